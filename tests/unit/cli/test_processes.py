"""Several servers of one data directory, as real processes: the client verbs keep the one that was there first."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 60


def perdure(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "perdure", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL
    )


@contextmanager
def up(url: str, data: Path, *arguments: str) -> Generator[str]:
    """A server until the block ends; its first lines on standard output, up to the one that says how to go on."""
    command = [sys.executable, "-m", "perdure", "up", "--data", str(data), "--port", "0", "--database-url", url]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            lines = [server.stdout.readline()]
            while lines[-1] and "Talk to" not in lines[-1] and not lines[-1].startswith("{"):
                lines.append(server.stdout.readline())
            yield "".join(lines)
        finally:
            server.terminate()
            assert server.wait(DEADLINE_S) == 0


def kept(data: Path) -> dict[str, Any]:
    return json.loads((data / "credentials.json").read_text())


def test_a_second_server_leaves_the_first_one_named_and_run_uses_it(database_url: str, tmp_path: Path) -> None:
    data = tmp_path / "site data"
    with up(database_url, data) as said:
        assert f"Talk to it: perdure chat --data '{data}'" in said
        first = kept(data)
        with up(database_url, data) as said:
            assert f"goes on naming the server at {first['url']}" in said
            assert kept(data) == first
        assert kept(data) == first
        done = perdure("run", "--data", str(data), "--model", "scripted/demo", "--", "[[say: Hello.]]")
        assert done.returncode == 0, done.stderr
        assert f"Using the server at {first['url']}." in done.stderr
        assert done.stdout.startswith("Hello.\n")
        assert kept(data) == first
        listed = perdure("sessions", "list", "--json", "--data", str(data))
        assert len(json.loads(listed.stdout)["data"]) == 1
    assert kept(data) == {**first, "url": None, "pid": None}
    refused = perdure("sessions", "list", "--data", str(data))
    assert (refused.returncode, "No server runs in" in refused.stderr) == (2, True)
    with up(database_url, data, "--json") as said:
        assert json.loads(said)["api_key"] == first["api_key"]


def test_run_with_another_database_has_a_server_of_its_own(database_url: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(database_url, data):
        first = kept(data)
        flags = ("--data", str(data), "--model", "scripted/demo", "--database-url")
        same = perdure("run", *flags, database_url, "--", "[[say: Hello.]]")
        assert same.returncode == 0 and f"Using the server at {first['url']}." in same.stderr
        other = perdure("run", *flags, f"{database_url}&application_name=other", "--", "[[say: Hello.]]")
        assert other.returncode == 0, other.stderr
        assert "Ready at" in other.stderr and first["url"] not in other.stderr
        assert kept(data) == first


def test_a_closed_standard_input_is_nothing_to_send(database_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure", "run", "--data", str(tmp_path), "--database-url", database_url]
    shell = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2 and "Standard input has no line to send" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_leaves_no_address_behind(database_url: str, tmp_path: Path) -> None:
    flags = ("--data", str(tmp_path / "data"), "--port", "0", "--database-url", database_url)
    done = perdure("run", *flags, "--model", "scripted/demo", "--", "[[say: Hello.]]")
    assert done.returncode == 0, done.stderr
    assert (kept(tmp_path / "data")["url"], kept(tmp_path / "data")["api_key"][:3]) == (None, "pk_")


def test_a_model_to_warm_that_nobody_serves_is_told_and_keeps_nothing_from_starting(
    database_url: str, tmp_path: Path
) -> None:
    flags = ("--data", str(tmp_path / "data"), "--port", "0", "--database-url", database_url, "--json")
    command = [sys.executable, "-m", "perdure", "up", *flags]
    environment = {**os.environ, "PERDURE_WARM_MODEL": "nope/x"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["url"]
        server.terminate()
        _, said = server.communicate(timeout=DEADLINE_S)
    assert "Warning: warm_model makes nothing ready. No provider serves the model 'nope/x'" in said


def test_doctor_counts_in_english(database_url: str, tmp_path: Path) -> None:
    def detail() -> str:
        done = perdure("doctor", "--json", "--database-url", database_url, "--data", str(tmp_path / "none"))
        return next(c["detail"] for c in json.loads(done.stdout)["checks"] if c["name"] == "database")

    assert detail().endswith(", 0 workspaces")
    assert perdure("workspaces", "create", "acme", "--database-url", database_url).returncode == 0
    assert detail().endswith(", 1 workspace")
    assert not (tmp_path / "none").exists()
