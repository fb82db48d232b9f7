"""Verbs, options, exit codes, and the JSON that programs read."""

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
        (["up", "--bus", "pigeon"], "`$.bus`"),
        (["up", "--engine", "steam"], "`$.engine`"),
        (["worker", "--port", "1"], "--port"),
        (["inputs", "list"], "Missing argument"),
        (["sessions", "list", "--limit", "0"], "--limit"),
        (["sessions", "list"], "perdure up"),
        (["chat", "--session", "sesn_x", "--model", "m"], "leave out --session"),
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


def test_a_server_that_is_not_perdure_is_named(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals.append((404, {}))
    assert main(["chat", "hi", *at(server)]) == 1
    assert "answered 404" in capsys.readouterr().err
