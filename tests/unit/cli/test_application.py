"""Verbs, options, exit codes, and the JSON that programs read."""

import io
import json
import socket
from pathlib import Path

import pytest
from tests.unit.cli.answering import KEY, SESSION, Answering, reply

from perdure.cli import main


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of whoever runs the tests."""
    for name in ("PERDURE_URL", "PERDURE_API_KEY", "PERDURE_DATA", "PERDURE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def at(server: Answering) -> list[str]:
    return ["--url", server.url, "--api-key", KEY]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["up", "--port", "x"], "--port"),
        (["up", "--port", "70000"], "--port"),
        (["up", "--bus", "pigeon"], "(from the flag --bus): it must be one of auto, inprocess, notify"),
        (["up", "--engine", "steam"], "The setting engine can't be 'steam'"),
        (["worker", "--port", "1"], "--port"),
        (["inputs", "list"], "Missing argument"),
        (["sessions", "list", "--limit", "0"], "--limit"),
        (["sessions", "list"], "perdure up"),
        (["chat", "--session", "sesn_x", "--model", "m"], "leave out --session"),
        (["up", "--database-url", "foo"], "of the form postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        (["chat", ""], "The message is empty"),
        (["chat", " \t ", "--url", "http://x", "--api-key", "k"], "The message is empty"),
        (["run", "  "], "The message is empty"),
        (["chat", "--session", "x", "--url", "http://x", "--api-key", "k"], "it starts with sesn_"),
        (["keys", "list"], "The data directory '.perdure' does not exist: `perdure up` makes one"),
        (["workspaces", "list", "--data", "a b"], "`perdure up --data 'a b'` makes one"),
        (["workspaces", "create", "acme"], "does not exist"),
        (["keys", "create"], "does not exist"),
        (["keys", "revoke", "nonsense"], "it starts with key_"),
        (["keys", "create", "--name", ""], "1 to 100 printable characters"),
        (["inputs", "list", "../x", "--url", "http://x", "--api-key", "k"], "it starts with sesn_"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "up" in capsys.readouterr().out
    assert main(["--help"]) == 0


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["up", "--data", str(tmp_path / "data"), "--port", str(port)]) == 2
    assert f"Port {port} on 127.0.0.1 is taken" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_an_address_of_another_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--host", "192.0.2.1", "--port", "8700"]) == 2
    assert "Choose --host" in capsys.readouterr().err


def test_sessions_are_listed_for_people_and_for_programs(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "list", *at(server)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split("\t") == ["id", "status", "model", "created_at", "title"]
    assert row.split("\t") == [SESSION, "idle", "scripted/demo", "2026-12-01T12:00:00Z", "A title"]
    assert main(["sessions", "list", "--json", *at(server)]) == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["id"] == SESSION


def test_inputs_are_listed_and_withdrawn(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inputs", "list", SESSION, *at(server)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split("\t")[:4] == ["sevt_in", "message", "waiting", "-"]
    assert main(["inputs", "list", SESSION, "--json", *at(server)]) == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["state"] == "waiting"
    assert main(["inputs", "withdraw", SESSION, "sevt_in", "--json", *at(server)]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "sevt_in", "type": "input_withdrawn"}
    assert server.requests[-1][:2] == ("POST", f"/perdure/v1/sessions/{SESSION}/inputs/sevt_in/withdraw")


def test_a_refusal_of_the_server_exits_1(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals.append((400, {"type": "x", "message": "No input with this id waits."}))
    assert main(["inputs", "withdraw", SESSION, "sevt_in", *at(server)]) == 1
    assert "perdure: The server answered 400: No input with this id waits." in capsys.readouterr().err


def test_chat_sends_one_message_and_prints_the_reply_alone(
    server: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    server.turns.append(reply("Paris."))
    assert main(["chat", "capital?", *at(server)]) == 0
    assert capsys.readouterr().out == "Paris.\n"


def test_a_session_is_shown_and_archived(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "show", SESSION, *at(server)]) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (shown["status"], shown["tokens"]) == ("idle", "12 in, 3 out")
    assert main(["sessions", "show", SESSION, "--json", *at(server)]) == 0
    assert json.loads(capsys.readouterr().out)["environment_id"] == "env_one"
    assert main(["sessions", "archive", SESSION, *at(server)]) == 0
    assert "Archived" in capsys.readouterr().out
    assert server.requests[-1][:2] == ("POST", f"/v1/sessions/{SESSION}/archive")


def test_a_session_that_is_not_there_is_not_announced(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--session", "sesn_other", "hi", *at(server)]) == 1
    assert capsys.readouterr().err.startswith("perdure: The server answered 404: Session not found.")


def test_a_chat_without_a_server_says_that_there_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--session", SESSION, "hi", "--url", "http://127.0.0.1:9", "--api-key", KEY]) == 1
    assert capsys.readouterr().err.startswith("perdure: No answer from http://127.0.0.1:9")


def test_a_pipe_without_a_line_makes_nothing(
    server: Answering, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n   \n"))
    assert main(["chat", *at(server)]) == 2
    assert "no line to send" in capsys.readouterr().err
    assert main(["run", "--data", "nowhere"]) == 2
    assert server.bodies == []
    assert not Path("nowhere").exists()


def test_a_variable_that_nothing_reads_is_told(
    server: Answering, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_PROT", "9000")
    assert main(["sessions", "list", *at(server)]) == 0
    assert "PERDURE_PROT" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["keys", "list"], ["doctor"], ["workspaces", "create", "acme"]])
def test_a_verb_that_works_with_what_is_makes_no_data_directory(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--data", str(tmp_path / "typo")]) != 0
    assert not (tmp_path / "typo").exists()


def test_a_directory_without_a_database_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", "--data", str(tmp_path)]) == 2
    assert "has no database of its own" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_had_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["up", "--data", str(tmp_path / "file" / "data"), "--port", "0"]) == 2
    assert f"'{tmp_path}/file" in capsys.readouterr().err
    assert main(["up", "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "192.0.2.1:0" in capsys.readouterr().err


def test_a_server_that_is_not_perdure_is_named(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals.append((404, {}))
    assert main(["chat", "hi", *at(server)]) == 1
    assert "answered 404" in capsys.readouterr().err
