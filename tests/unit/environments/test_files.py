"""The file tools: their results and limits, and a workspace full of traps."""

import asyncio
import base64
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.environments.driving import Driver, children_with, until

from perdure.environments import workspace
from perdure.environments.tools import READ_ONLY_TOOLS, TOOL_DEFINITIONS
from perdure.environments.workspace import Workspace

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_the_definitions_have_the_official_names_and_inputs() -> None:
    shape = {tool["name"]: set(tool["input_schema"]["properties"]) for tool in TOOL_DEFINITIONS}
    assert shape == {
        "bash": {"command", "restart", "timeout_ms"},
        "read": {"file_path", "view_range"},
        "write": {"file_path", "content"},
        "edit": {"file_path", "old_string", "new_string", "replace_all"},
        "glob": {"pattern", "path"},
        "grep": {"pattern", "path"},
    }
    assert {"read", "glob", "grep"} == READ_ONLY_TOOLS


async def test_an_unknown_tool_is_an_error_that_lists_the_known(driver: Driver) -> None:
    assert "bash, read, write, edit, glob, grep" in await driver.error("str_replace", path="x")


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("read", {}, "read: file_path: is required"),
        ("read", {"file_path": None}, "read: file_path: is required"),
        ("read", {"file_path": "a", "view_range": [1]}, "read: view_range: must be an array of two integers"),
        ("read", {"file_path": "a", "view_range": [1, "2"]}, "read: view_range: must be an array of two integers"),
        ("write", {"path": "a", "content": "x"}, "write: path: unknown field; known are file_path, content"),
        ("write", {"file_path": "a", "content": 1}, "write: content: must be a string"),
        ("write", {"file_path": "", "content": ""}, "write: path '' must not be empty"),
        ("write", {"file_path": "a" * 5_000, "content": ""}, "write: file_path: must have at most 4096"),
        ("edit", {"file_path": "a", "old_string": "", "new_string": "x"}, "edit: old_string: must not be empty"),
        ("edit", {"file_path": "a", "old_string": "x", "new_string": "x"}, "edit: new_string: must differ"),
        ("edit", {"file_path": "a", "old_string": "x", "new_string": "y", "replace_all": 1}, "edit: replace_all: "),
        ("glob", {"pattern": "/etc/*"}, "glob: pattern: must be relative"),
        ("glob", {"pattern": "a/../../*"}, "glob: pattern: '..' is not permitted"),
        ("glob", {"pattern": "{a,b}" * 8}, "glob: pattern: its braces make more than 64"),
        ("grep", {"pattern": "("}, "grep: pattern: not a valid regular expression"),
        ("grep", {"pattern": "x", "path": "missing"}, "grep: missing: no such file or directory"),
    ],
)
async def test_bad_arguments_name_the_field_and_the_rule(
    driver: Driver, tool: str, arguments: dict[str, object], told: str
) -> None:
    assert (await driver.error(tool, **arguments)).startswith(told)


# read


async def test_read_gives_text_and_ranges_of_lines(driver: Driver) -> None:
    await driver.ok("write", file_path="a.txt", content="one\ntwo\nthree\n")
    assert await driver.ok("read", file_path="a.txt") == "one\ntwo\nthree\n"
    assert await driver.ok("read", file_path="/workspace/a.txt", view_range=[2, 2]) == "two"
    assert await driver.ok("read", file_path="./a.txt", view_range=[2, 0]) == "two\nthree"
    assert await driver.ok("read", file_path="a.txt", view_range=[2, 99]) == "two\nthree"
    assert "has 3 lines" in await driver.error("read", file_path="a.txt", view_range=[4, 5])
    assert "must not come before" in await driver.error("read", file_path="a.txt", view_range=[3, 2])
    await driver.ok("write", file_path="empty", content="")
    assert await driver.ok("read", file_path="empty") == "(no output)"


async def test_read_bounds_text_and_ranges(driver: Driver) -> None:
    await driver.ok("write", file_path="big", content="0123456789abcde\n" * 20_000)
    assert "more than the 262144 that can be read at once" in await driver.error("read", file_path="big")
    assert await driver.ok("read", file_path="big", view_range=[19_999, 20_000]) == "0123456789abcde\n0123456789abcde"
    assert "narrow it" in await driver.error("read", file_path="big", view_range=[1, 20_000])
    await driver.ok("write", file_path="line", content="x" * 300_000 + "\nend")
    assert "narrow it" in await driver.error("read", file_path="line", view_range=[1, 1])
    assert await driver.ok("read", file_path="line", view_range=[2, 2]) == "end"


async def test_read_replaces_nul_and_refuses_what_is_no_text(driver: Driver) -> None:
    await driver.bash(r"printf 'a\0b' > nul; printf '\377\376' > binary; mkdir folder; mkfifo pipe")
    assert await driver.ok("read", file_path="nul") == "a\ufffdb"
    assert "is no UTF-8 text" in await driver.error("read", file_path="binary")
    for path in ("folder", "pipe", "."):
        assert "not a regular file" in await asyncio.wait_for(driver.error("read", file_path=path), 10)
    assert "no such file or directory" in await driver.error("read", file_path="missing")
    assert "not a directory" in await driver.error("read", file_path="nul/x")


@pytest.mark.parametrize(
    ("name", "head", "media_type"),
    [
        ("a.png", PNG, "image/png"),
        ("b.JPG", b"\xff\xd8\xff\xe0rest", "image/jpeg"),
        ("c.gif", b"GIF89arest", "image/gif"),
        ("d.webp", b"RIFF\x04\0\0\0WEBPrest", "image/webp"),
        ("wrong.jpeg", PNG, "image/png"),
        ("e.pdf", b"%PDF-1.7 rest", "application/pdf"),
    ],
)
async def test_read_gives_images_and_documents_as_blocks(
    driver: Driver, name: str, head: bytes, media_type: str
) -> None:
    await driver.ok("write", file_path="x", content="")
    (driver.folder / name).write_bytes(head)
    result = await driver.call("read", file_path=name)
    [block] = result.content
    assert block["type"] == ("document" if name.endswith(".pdf") else "image")
    assert block["source"] == {"type": "base64", "media_type": media_type, "data": base64.b64encode(head).decode()}


async def test_read_refuses_media_that_lie_or_are_too_large(driver: Driver) -> None:
    await driver.bash("echo text > a.png; echo text > a.pdf; truncate -s 3932161 b.png; truncate -s 20971521 b.pdf")
    assert "no PNG, JPEG, GIF or WebP" in await driver.error("read", file_path="a.png")
    assert "no PDF document" in await driver.error("read", file_path="a.pdf")
    assert "more than the 3932160 allowed for an image" in await driver.error("read", file_path="b.png")
    assert "more than the 20971520 allowed for a PDF document" in await driver.error("read", file_path="b.pdf")
    assert "not supported" in await driver.error("read", file_path="a.png", view_range=[1, 2])


# write and edit


async def test_write_makes_parents_and_overwrites_keeping_the_mode(driver: Driver) -> None:
    assert await driver.ok("write", file_path="a/b/c.sh", content="é\n") == "wrote 3 bytes to a/b/c.sh"
    await driver.bash("chmod 755 a/b/c.sh")
    await driver.ok("write", file_path="/workspace/a/b/c.sh", content="echo new")
    assert await driver.bash("a/b/c.sh; ls -A a/b") == "new\nc.sh"
    assert "not a regular file" in await driver.error("write", file_path="a/b", content="x")
    assert "not a directory" in await driver.error("write", file_path="a/b/c.sh/d", content="x")


async def test_edit_wants_a_unique_match_or_replace_all(driver: Driver) -> None:
    await driver.ok("write", file_path="a", content="x y x\r\n")
    assert "not found" in await driver.error("edit", file_path="a", old_string="z", new_string="q")
    assert "appears 2 times" in await driver.error("edit", file_path="a", old_string="x", new_string="q")
    assert await driver.ok("edit", file_path="a", old_string="y", new_string="") == "edited a (1 replacement)"
    told = await driver.ok("edit", file_path="a", old_string="x", new_string="q", replace_all=True)
    assert told == "edited a (2 replacements)"
    assert (driver.folder / "a").read_bytes() == b"q  q\r\n"


async def test_edit_refuses_binary_and_large_files_unchanged(driver: Driver) -> None:
    await driver.bash(r"printf 'a\377' > binary; truncate -s 262145 large")
    assert "is no UTF-8 text" in await driver.error("edit", file_path="binary", old_string="a", new_string="b")
    assert "more than the 262144" in await driver.error("edit", file_path="large", old_string="a", new_string="b")
    assert (driver.folder / "binary").read_bytes() == b"a\xff"


# Traps


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "/workspace/../x", "/workspacex", "/"])
async def test_paths_outside_the_workspace_are_refused(driver: Driver, path: str) -> None:
    for tool, more in (("read", {}), ("write", {"content": "x"}), ("edit", {"old_string": "a", "new_string": "b"})):
        told = await driver.error(tool, file_path=path, **more)
        assert "leads out of /workspace" in told or "is outside /workspace" in told or "no such file" in told
    await driver.error("grep", pattern="root", path=path)
    assert not (driver.root / "x").exists()


async def test_links_out_of_the_workspace_are_refused(driver: Driver, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("keep me")
    await driver.bash(
        f"ln -s {outside}/secret file; ln -s {outside} folder; ln -s ../../outside climb; ln -s folder second;"
        f" ln -s {outside}/new dangling; ln -s loop loop; mkdir d; ln -s ../../s1/../x d/x"
    )
    for path in ("file", "folder/secret", "climb/secret", "second/secret", "dangling", "d/x", "loop"):
        for tool, more in (("read", {}), ("write", {"content": "x"}), ("edit", {"old_string": "k", "new_string": "b"})):
            told = await driver.error(tool, file_path=path, **more)
            assert "leads out of /workspace" in told or "too many levels" in told, told
    assert await driver.ok("grep", pattern="keep") == "no matches"
    assert "leads out" in await driver.error("grep", pattern="keep", path="folder")
    assert "secret" not in await driver.ok("glob", pattern="**/*")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "keep me"


@pytest.mark.parametrize("tool", ["read", "glob"])
async def test_links_that_go_up_and_down_for_ever_are_given_up(
    driver: Driver, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bounds of path and links, forty of them lead through millions of folders."""
    entered, enter = 0, workspace.enter

    def count(*arguments: Any, **more: Any) -> int:
        nonlocal entered
        entered += 1
        assert threading.current_thread() is not threading.main_thread(), "the loop would stand still"
        return enter(*arguments, **more)

    deep = "/".join("d" * 100)
    await driver.bash(
        f"mkdir -p {deep}; cd {deep}; ups=; for i in {{1..700}}; do ups=$ups../d/; done;"
        ' for i in {1..30}; do ln -s "${ups}l$((i + 1))" l$i; done'
    )
    monkeypatch.setattr(workspace, "enter", count)
    name = {"read": "file_path", "glob": "path"}[tool]
    more = {"read": {}, "glob": {"pattern": "*"}}[tool]
    assert "too many levels of symbolic links" in await driver.error(tool, **{name: f"{deep}/l1"}, **more)
    assert entered == workspace.FOLDERS_ENTERED_MAX


async def test_links_inside_the_workspace_work_as_in_the_sandbox(driver: Driver) -> None:
    await driver.bash("mkdir -p a/b; echo x > a/b/f; ln -s /workspace/a/b abs; ln -s a/b rel; ln -s ../rel/f a/hop")
    for path in ("abs/f", "rel/f", "a/hop", "abs/../b/f", "rel/../../abs/f"):
        assert await driver.ok("read", file_path=path) == "x\n"
    await driver.ok("write", file_path="a/hop", content="y")
    assert await driver.bash("cat a/b/f; readlink a/hop") == "y../rel/f"
    assert "/workspace/a/b/f:1:y" in await driver.ok("grep", pattern="y", path="rel")


async def test_a_link_that_comes_and_goes_never_leads_out(driver: Driver, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("secret")
    await driver.bash(
        "mkdir real; echo inside > real/f; ln -sfn real here;"
        f" (while [ ! -e /workspace/stop ]; do ln -sfn {outside} here; ln -sfn real here; done) >/dev/null 2>&1 &"
    )
    for _ in range(200):
        result = await driver.call("read", file_path="here/f")
        assert result.is_error or result.content[0]["text"] == "inside\n"
        await driver.call("write", file_path="here/f", content="inside\n")
    await driver.ok("write", file_path="stop", content="")
    assert (outside / "f").read_text() == "secret"
    assert os.listdir(outside) == ["f"]


@pytest.mark.parametrize("swapped", ["real", "f"])
def test_a_link_planted_between_the_look_and_the_use_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for place in (outside, folder / "real"):
        place.mkdir(parents=True)
        (place / "f").write_text(place.name)
    look = os.lstat

    def look_then_plant(name: str, *, dir_fd: int | None = None) -> os.stat_result:
        facts = look(name, dir_fd=dir_fd)
        if name == swapped:
            os.rename(name, "aside", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.symlink(outside if name == "real" else outside / "f", name, dir_fd=dir_fd)
        return facts

    monkeypatch.setattr("perdure.environments.workspace.look", look_then_plant)
    with pytest.raises(OSError), Workspace(folder).open_file("real/f") as (descriptor, _):
        pytest.fail(f"opened {os.read(descriptor, 100)!r}")


# glob and grep


async def test_glob_is_doublestar_and_newest_first(driver: Driver) -> None:
    await driver.bash(
        "mkdir -p a/b .git; touch -d 2001-01-01 a/old.py; touch -d 2003-01-01 a/b/new.py; touch -d 2002-01-01 mid.py;"
        " touch -d 2000-01-01 a/b/x.txt .git/h.py"
    )
    assert (
        await driver.ok("glob", pattern="**/*.py", path="/workspace/a") == "/workspace/a/b/new.py\n/workspace/a/old.py"
    )
    assert (await driver.ok("glob", pattern="**/*.py")).splitlines() == [
        "/workspace/a/b/new.py",
        "/workspace/mid.py",
        "/workspace/a/old.py",
        "/workspace/.git/h.py",
    ]
    assert await driver.ok("glob", pattern="*.py") == "/workspace/mid.py"
    assert await driver.ok("glob", pattern="/workspace/a/*.py") == "/workspace/a/old.py"
    assert await driver.ok("glob", pattern="a/{b/x.txt,nothing}") == "/workspace/a/b/x.txt"
    assert await driver.ok("glob", pattern="a/**/b/[x]?txt") == "/workspace/a/b/x.txt"
    assert await driver.ok("glob", pattern="*.rs") == "no matches"
    assert "is not a directory" in await driver.error("glob", pattern="*", path="mid.py")


async def test_glob_shows_200_and_counts_the_rest(driver: Driver) -> None:
    await driver.bash("touch {1..250}.txt")
    lines = (await driver.ok("glob", pattern="*.txt")).splitlines()
    assert len(lines) == 201
    assert lines[-1] == "[the newest 200 of 250 matches; narrow the pattern to see others]"


async def test_a_walk_stops_after_50000_entries(driver: Driver) -> None:
    await driver.bash("mkdir many; cd many; seq 50100 | xargs touch")
    for tool, pattern in (("glob", "**/none"), ("grep", "nothing")):
        assert "[stopped after 50000 entries; give a narrower `path`]" in await driver.ok(tool, pattern=pattern)


async def test_grep_gives_path_line_and_text(driver: Driver) -> None:
    await driver.bash(
        r"mkdir -p a node_modules; printf 'one\ntwo\r\nthree\n' > a/f; echo two > node_modules/f; printf 'two\0' > bin;"
        " head -c 3000 /dev/zero | tr '\\0' x > long; echo two >> long; echo two > z"
    )
    assert (await driver.ok("grep", pattern="^tw[o]$")).splitlines() == [
        "/workspace/z:1:two",
        "/workspace/a/f:2:two",
        "[1 lines longer than 2000 characters were not searched]",
    ]
    assert await driver.ok("grep", pattern="T(?i:WO)|three", path="a/f") == "/workspace/a/f:3:three"
    assert (
        await driver.ok("grep", pattern="nowhere")
        == "no matches\n[1 lines longer than 2000 characters were not searched]"
    )


async def test_glob_cuts_its_output(driver: Driver) -> None:
    name = "n" * 250
    await driver.bash(f"for i in {{1..4}}; do mkdir {name}; cd {name}; done; touch {{101..220}}")
    assert len((await driver.ok("glob", pattern="**/2*")).splitlines()) == 21
    assert "/workspace/.perdure/output/1.txt" in await driver.ok("glob", pattern="**/*")
    *shown, last = (driver.folder / ".perdure/output/1.txt").read_text().splitlines()
    assert 99 * 1024 < sum(len(line) + 1 for line in shown) <= 100 * 1024
    assert last == f"[the newest {len(shown)} of 124 matches; narrow the pattern to see others]"


async def test_grep_cuts_its_output(driver: Driver) -> None:
    await driver.bash("seq 100000 > numbers")
    shown = await driver.ok("grep", pattern="1")
    assert "[output cut at 102400 bytes" in shown


async def test_a_catastrophic_pattern_is_killed_and_the_loop_stays_free(driver: Driver) -> None:
    await driver.ok("write", file_path="trap", content="a" * 60 + "!")
    searching = asyncio.create_task(driver.call("grep", pattern="(a+)+$", call_timeout_ms=1_500))
    assert await asyncio.wait_for(driver.bash("echo meanwhile"), 10) == "meanwhile"
    result = await searching
    assert result.is_error
    assert result.content[0]["text"] == "grep: took longer than 1500 ms and was stopped"
    assert children_with("environments/search.py") == []


async def test_cancelling_a_search_kills_it(driver: Driver) -> None:
    await driver.ok("write", file_path="trap", content="a" * 60 + "!")
    searching = asyncio.create_task(driver.call("grep", pattern="(a+)+$"))
    await until(lambda: children_with("environments/search.py") != [], "the search runs")
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    assert children_with("environments/search.py") == []


# Long results


async def test_a_long_result_goes_to_a_file_and_the_model_gets_a_preview(driver: Driver) -> None:
    shown = await driver.bash("seq -f 'line %06g' 8400")
    assert len(shown) < 10_000
    assert "are in /workspace/.perdure/output/1.txt" in shown
    assert "line 000001\n" in shown
    assert shown.endswith("line 008400")
    kept = (driver.folder / ".perdure/output/1.txt").read_text()
    assert kept.splitlines() == [f"line {number:06}" for number in range(1, 8401)]
    assert "output/2.txt" in await driver.bash("seq -f 'line %06g' 8400")
    assert await driver.ok("read", file_path=".perdure/output/2.txt", view_range=[8, 8]) == "line 000008"
    assert "output/1.txt:7:line 000007" in await driver.ok("grep", pattern="0007$", path=".perdure/output/1.txt")


async def test_a_long_file_is_previewed_without_a_copy(driver: Driver) -> None:
    await driver.ok("write", file_path="long.txt", content="x" * 120_000)
    shown = await driver.ok("read", file_path="long.txt")
    assert shown.startswith("[120000 characters are too many to show; all of them are in long.txt.")
    assert not (driver.folder / ".perdure").exists()


async def test_a_planted_link_does_not_lead_a_long_result_out(driver: Driver, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    await driver.bash(f"ln -s {outside} .perdure")
    shown = await driver.bash("seq -f 'line %06g' 8400")
    assert "It could not be written" in shown
    assert list(outside.iterdir()) == []
