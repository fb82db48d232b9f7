"""The compatibility page says what the SDK, the rules and the outcomes say, and refuses sources that it cannot read."""

from pathlib import Path

import pytest

from perdure.testing.compatibility import (
    Malformed,
    Page,
    Proof,
    Rule,
    SdkMethod,
    main,
    read_claims,
    read_rules,
    read_sdk_methods,
    render,
)

PAGE = Page(
    sdk_version="1.2.3",
    methods=[
        SdkMethod("sessions.create", "POST", "/v1/sessions"),
        SdkMethod("sessions.list", "GET", "/v1/sessions"),
        SdkMethod("vaults.create", "POST", "/v1/vaults"),
    ],
    served=frozenset({"sessions.create", "sessions.list"}),
    rules=[
        Rule("MA-A1.1", "a", "face", "", "", "p"),
        Rule("MA-A1.2", "b", "owned", "domain/turn", "", "p"),
        Rule("MA-A1.3", "c", "excused", "", "not built", "p"),
    ],
    claims={"MA-A1.2": ["domain/turn:decide"]},
    proofs={
        "SDK:sessions.create": [
            Proof("tests/c/test_s.py::test_x[1]", "passed"),
            Proof("tests/c/test_s.py::test_x[2]", "passed"),
        ],
        "MA-A1.1": [Proof("tests/c/test_s.py::test_x", "passed"), Proof("tests/c/test_s.py::test_y", "failed")],
    },
)


def test_each_row_says_how_far_it_is_proved() -> None:
    lines = render(PAGE).splitlines()
    assert "| `sessions.create` | `POST /v1/sessions` | proved | `c/test_s.py::test_x` |" in lines
    assert "| `sessions.list` | `GET /v1/sessions` | open |  |" in lines
    assert "| `vaults.create` | `POST /v1/vaults` | not built |  |" in lines
    assert "| MA-A1.1 | failing | `c/test_s.py::test_y` |  |" in lines
    assert "| MA-A1.2 | open |  | `domain/turn:decide` |" in lines
    assert "| MA-A1.3 | excused: not built |  |  |" in lines


def test_the_counts_add_up() -> None:
    lines = render(PAGE).splitlines()
    assert "| SDK methods | 1 | 0 | 1 | 1 | 3 |" in lines
    assert "| Contract rules | 0 | 1 | 1 | 1 | 3 |" in lines


def test_a_served_method_that_the_sdk_lacks_is_refused() -> None:
    with pytest.raises(Malformed, match="that the SDK does not have"):
        render(PAGE._replace(served=frozenset({"sessions.fork"})))


def test_requests_are_read_from_the_source_of_the_sdk() -> None:
    methods = {method.name: method for method in read_sdk_methods()}
    assert methods["sessions.events.stream"][1:] == ("GET", "/v1/sessions/{session_id}/events/stream")
    assert methods["sessions.threads.events.stream"][1:] == (
        "GET",
        "/v1/sessions/{session_id}/threads/{thread_id}/stream",
    )
    assert methods["sessions.events.tool_runner"][1:] == (None, None)
    assert methods["environments.delete"].verb == "DELETE"
    assert not any(name.startswith(("messages.", "organization.", "models.")) for name in methods)


@pytest.mark.parametrize(
    "row",
    [
        "| MA-A1.1 | text | done |",
        "| MA-A1.1 | text | excused: |",
        "| MA-A1.1 | text | owned: turn |",
        "| MA-A1.1 | text | owned: core/turns |",
        "| MA-A1.1 | text | core: domain/turn |",
        "| MA-A1.1 | text |",
        "| MA-A1.1 | text | face |\n| MA-A1.1 | again | face |",
    ],
)
def test_a_rule_row_that_says_too_little_or_too_much_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "p.md").write_text(row + "\n", encoding="utf-8")
    with pytest.raises(Malformed, match=r"p\.md:"):
        read_rules(tmp_path)


def test_claims_are_found_in_docstrings_only(tmp_path: Path) -> None:
    domain = tmp_path / "domain"
    domain.mkdir()
    (domain / "turn.py").write_text(
        '"""MA-C1.1 here."""\n# MA-C1.2\ndef f():\n    """Does MA-C1.12."""\n    return "MA-C1.3"\n', encoding="utf-8"
    )
    core = tmp_path / "core"
    core.mkdir()
    (core / "settle.py").write_text('def end():\n    """MA-C1.12 again, and MA-C1.12."""\n', encoding="utf-8")
    assert read_claims(domain) == {"MA-C1.1": ["domain/turn:"], "MA-C1.12": ["domain/turn:f"]}
    both = read_claims(domain, core)
    assert both["MA-C1.12"] == ["domain/turn:f", "core/settle:end", "core/settle:end"]


def test_check_tells_a_stale_page_from_a_current_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contracts = tmp_path / "docs" / "contracts"
    contracts.mkdir(parents=True)
    (contracts / "p.md").write_text("| MA-A1.1 | text | face |\n", encoding="utf-8")
    rules = tmp_path / "rules.json"
    rules.write_text("{}", encoding="utf-8")
    arguments = ["--root", str(tmp_path), "--rules", str(rules)]
    assert main([*arguments, "--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    rules.write_text('{"MA-A1.1": [{"nodeid": "tests/t.py::t", "outcome": "passed"}]}', encoding="utf-8")
    assert main([*arguments, "--check"]) == 1
