"""The persistent shell: state between commands, exit codes that nothing can fake or hide, time limits, output bounds."""

import asyncio

import pytest
from tests.unit.environments.driving import Driver, running_with, text_of, until

from perdure.environments import local, tools
from perdure.environments.local import SHELL_RESTARTED
from perdure.harnesses import loop


async def test_state_lasts_from_command_to_command(driver: Driver) -> None:
    assert await driver.bash("cd /tmp; here=5; say() { echo said $1; }; declare -A map=([k]=v)") == "(no output)"
    assert await driver.bash("pwd; say $here; echo ${map[k]}") == "/tmp\nsaid 5\nv"


async def test_failure_carries_output_and_code(driver: Driver) -> None:
    assert await driver.error("bash", command="echo out; echo err >&2; (exit 7)") == "out\nerr\n[exit code 7]"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("cat; read line; echo end", "end"),
        ("exec 1>&- 2>&-", "(no output)"),
        ("exec >/dev/null", "(no output)"),
        ("printf 'deadbeefdeadbeef 5\\n'; echo 'x 0' >&2", "deadbeefdeadbeef 5\nx 0"),
        ("printf() { :; }; eval() { :; }; echo ours", "ours"),
        ("cat <<'END'\nit's \"quoted\" $HOME\nEND", 'it\'s "quoted" $HOME'),
        ("echo one # a comment", "one"),
        ("sleep 1000 & echo left one behind", "left one behind"),
        ("(sleep 1000; echo late) & disown; echo x", "x"),
        ("set -x; set +x; echo y 2>&1 | cat", "++ set +x\ny"),
    ],
)
async def test_a_command_can_not_lose_its_end(driver: Driver, command: str, expected: str) -> None:
    assert await driver.bash(command) == expected
    assert await driver.bash("echo next") == "next"


@pytest.mark.parametrize("command", ["if", "echo 'open", "echo $((", "cat <<", "break", "f() {"])
async def test_broken_syntax_stays_inside_its_command(driver: Driver, command: str) -> None:
    await driver.bash("kept=1")
    await driver.call("bash", command=command)
    assert await driver.bash("echo $kept") == "1"


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("set -e; false", 1), ("exec sh -c 'exit 4'", 4)]
)
async def test_the_shells_own_end_is_noticed_and_told_once(driver: Driver, command: str, code: int) -> None:
    told = await driver.error("bash", command=f"echo before; {command}")
    assert told.startswith(f"before\n[the shell ended with exit code {code}: ")
    assert await driver.bash("echo fresh") == "fresh"


async def test_a_shell_that_dies_between_commands_is_replaced_with_a_notice(driver: Driver) -> None:
    await driver.bash("x=1; (while [ ! -e /workspace/go ]; do sleep 0.01; done; kill -9 $$) & disown")
    # Once it is dead nothing may be kept of the session.
    shell = driver.environment._slots["s1"].shell  # pyright: ignore
    await driver.ok("write", file_path="go", content="")
    await until(lambda: not shell.alive, "the shell is dead")
    assert await driver.bash("echo $x.") == f"{SHELL_RESTARTED}\n."


async def test_its_own_timeout_kills_the_command_and_its_shell(driver: Driver) -> None:
    told = await driver.error("bash", command="x=1; echo begun; sleep 1234.25", timeout_ms=300)
    assert told.startswith("begun\n[timed out after 300 ms; the command and its shell were killed: ")
    assert running_with("1234.25") == []
    assert await driver.bash("echo $x.") == "."


@pytest.mark.rule("MA-F15")
async def test_without_a_wish_a_command_has_two_minutes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tools.BASH_TIMEOUT_MS_DEFAULT, tools.BASH_TIMEOUT_MS_MAX) == (loop.TOOL_MS, loop.SHELL_MS)
    assert (loop.TOOL_MS, loop.SHELL_MS, loop.STALL_MS) == (120_000, 600_000, 120_000)
    monkeypatch.setattr(local, "BASH_TIMEOUT_MS_DEFAULT", 300)
    assert "[timed out after 300 ms" in await driver.error("bash", command="sleep 60")


async def test_the_calls_timeout_bounds_the_commands(driver: Driver) -> None:
    told = await driver.error("bash", command="sleep 600", timeout_ms=600_000, call_timeout_ms=300)
    assert "timed out after" in told


async def test_a_stopped_shell_times_out(driver: Driver) -> None:
    assert "timed out after 300 ms" in await driver.error("bash", command="kill -STOP $$", timeout_ms=300)
    assert await driver.bash("echo fresh") == "fresh"


async def test_restart_gives_a_fresh_shell_without_a_notice(driver: Driver) -> None:
    await driver.bash("x=1; sleep 4321.5 &")
    assert await driver.ok("bash", restart=True) == "bash session restarted"
    assert running_with("4321.5") == []
    assert await driver.bash("echo $x.") == "."


async def test_the_last_100_kib_are_kept_and_the_rest_is_counted(driver: Driver) -> None:
    await driver.bash("seq 1 200000 > numbers")
    dropped = (driver.folder / "numbers").stat().st_size - 102_400
    shown = await driver.bash("cat numbers")
    assert f"[the first {dropped} bytes of output were dropped, the last 102400 follow]" in shown
    assert shown.endswith("\n199999\n200000")


async def test_a_flood_in_the_background_neither_blocks_nor_hides_anything(driver: Driver) -> None:
    await driver.bash("yes & echo started")
    assert "done" in await driver.bash("kill $!; wait $! 2>/dev/null; echo; echo done")
    assert await driver.bash("echo quiet") == "quiet"


async def test_background_output_comes_with_the_next_command(driver: Driver) -> None:
    await driver.bash("(while [ ! -e go ]; do sleep 0.01; done; echo from behind; touch gone) &")
    await driver.ok("write", file_path="go", content="")
    await until((driver.folder / "gone").exists, "the background process wrote")
    assert await driver.bash("echo in front") == "from behind\nin front"


async def test_escapes_are_stripped_and_broken_bytes_replaced(driver: Driver) -> None:
    command = r"printf '\033[1;31mred\033[0m \033]0;title\007bare \377 \000 \355\240\200 ok'"
    assert await driver.bash(command) == "red bare \ufffd \ufffd \ufffd\ufffd\ufffd ok"


async def test_commands_of_one_session_run_one_after_another(driver: Driver) -> None:
    slow = asyncio.create_task(driver.bash("echo a >> order; until [ -e go ]; do sleep 0.01; done; echo b >> order"))
    await until((driver.folder / "order").exists, "the first command runs")
    second = asyncio.create_task(driver.bash("echo c >> order"))
    # A file tool beside the running command is what lets it go on.
    await asyncio.wait_for(driver.ok("write", file_path="go", content=""), 10)
    await asyncio.gather(slow, second)
    assert (driver.folder / "order").read_text() == "a\nb\nc\n"


async def test_waiting_for_an_earlier_command_counts_against_the_time(driver: Driver) -> None:
    slow = asyncio.create_task(driver.bash("touch busy; until [ -e go ]; do sleep 0.01; done"))
    await until((driver.folder / "busy").exists, "the first command runs")
    told = await driver.error("bash", command="touch never", call_timeout_ms=100)
    assert "still running after 100 ms; this one was not started" in told
    await driver.ok("write", file_path="go", content="")
    await slow
    assert not (driver.folder / "never").exists()


async def test_sessions_do_not_wait_for_each_other(driver: Driver) -> None:
    slow = asyncio.create_task(driver.bash("touch busy; until [ -e go ]; do sleep 0.01; done"))
    await until((driver.folder / "busy").exists, "the first session is busy")
    other = Driver(driver.environment, driver.root, "s2")
    assert await asyncio.wait_for(other.bash("echo free"), 10) == "free"
    await driver.ok("write", file_path="go", content="")
    await slow


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "bash: command: is required, unless restart is true"),
        ({"command": None}, "bash: command: is required, unless restart is true"),
        ({"command": 5}, "bash: command: must be a string"),
        ({"command": "a\0b"}, "bash: command: must not contain U+0000"),
        ({"command": "a\ud800"}, "bash: command: must not contain lone surrogates"),
        ({"command": "x" * 140_000}, "bash: command: must have at most 131072 characters, has 140000"),
        ({"command": "a", "timeout": 5}, "bash: timeout: unknown field; known are command, restart, timeout_ms"),
        ({"command": "a", "timeout_ms": True}, "bash: timeout_ms: must be an integer"),
        ({"command": "a", "timeout_ms": 600_001}, "bash: timeout_ms: must be from 0 (the default) to 600000"),
        ({"command": "a", "timeout_ms": -1}, "bash: timeout_ms: must be from 0 (the default) to 600000"),
        ({"restart": "yes"}, "bash: restart: must be true or false"),
        ({"restart": True, "command": "a"}, "bash: command: must be left out when restart is true"),
    ],
)
async def test_bad_arguments_name_the_field_and_the_rule(
    driver: Driver, arguments: dict[str, object], told: str
) -> None:
    assert (await driver.error("bash", **arguments)).startswith(told)


async def test_a_long_command_is_run_whole(driver: Driver) -> None:
    result = await driver.call("bash", command=f"text='{'é' * 60_000}'; echo ${{#text}}")
    assert text_of(result) == "60000"
