"""A chat with one session: what is shown, what is asked, and how it ends."""

import io
import json
import os
import signal

import pytest
from tests.unit.cli.answering import SESSION, Answering, Turn, event, idle, reply, text
from tests.unit.cli.conftest import Answers, Terminal

from perdure.cli.asking import CtrlC, LineAsker
from perdure.cli.chat import Chat, Ending, converse
from perdure.cli.client import Client
from perdure.cli.exits import CommandFailed, Left
from perdure.cli.screen import JsonScreen, Trail


def chat(client: Client, terminal: Terminal, *lines: str | type[BaseException]) -> tuple[Chat, Answers]:
    asker = Answers(list(lines))
    return Chat(client, SESSION, terminal.screen(), asker), asker


def asks_for_bash(server: Answering, input_id: str) -> None:
    """A turn that parks."""
    server.publish(
        event("user.message", input_id, content=text("(as sent)")),
        event("agent.tool_use", "sevt_call", name="bash", input={"command": "ls"}),
        idle("sevt_parked", "requires_action", "sevt_call"),
    )


def resolves(server: Answering, input_id: str) -> None:
    del input_id
    server.publish(
        event("agent.tool_result", "sevt_result", tool_use_id="sevt_call", content=text("a\nb"), is_error=False),
        event("agent.message", "sevt_said", content=text("Two files.")),
        idle("sevt_end"),
    )


def test_a_reply_is_shown_once_though_it_comes_as_a_preview_and_whole(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    server.turns.append(reply("Paris is the capital."))
    talk, _ = chat(client, terminal)
    assert talk.say("What is the capital of France?") == Ending("end_turn", None)
    assert terminal.out.getvalue() == "Paris is the capital.\n"
    assert server.sent == [{"type": "user.message", "content": text("What is the capital of France?")}]


def test_the_end_of_an_earlier_turn_is_not_ours(server: Answering, client: Client, terminal: Terminal) -> None:
    def late(server: Answering, input_id: str) -> None:
        server.publish(idle("sevt_earlier"))
        reply("Now yours.")(server, input_id)

    server.turns.append(late)
    talk, _ = chat(client, terminal)
    assert talk.say("hi").is_good
    assert "Now yours." in terminal.out.getvalue()


def test_a_second_message_is_followed_from_where_the_first_ended(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    server.turns += [reply("one"), reply("two")]
    talk, _ = chat(client, terminal)
    talk.say("a")
    server.publish(event("user.message", "sevt_else", content=text("from somebody else")))
    talk.say("b")
    assert terminal.out.getvalue().splitlines() == ["one", "> from somebody else", "two"]
    assert server.resumed_from[0] is None
    assert server.resumed_from[1] is not None


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("y", {"result": "allow"}),
        ("YES", {"result": "allow"}),
        ("n", {"result": "deny"}),
        ("", {"result": "deny"}),
        ("not today", {"result": "deny", "deny_message": "not today"}),
    ],
)
def test_an_approval_is_asked_for_and_sent(
    server: Answering, client: Client, terminal: Terminal, line: str, answer: dict[str, str]
) -> None:
    server.turns += [asks_for_bash, resolves]
    talk, asker = chat(client, terminal, line)
    assert talk.say("list").is_good
    assert asker.questions == ['Allow bash {"command": "ls"} ? [y]es, [n]o, or say why not: ']
    assert server.sent[1] == {"type": "user.tool_confirmation", "tool_use_id": "sevt_call", **answer}
    assert "\N{LEFTWARDS ARROW} bash\n  a\n  b\nTwo files.\n" in terminal.out.getvalue()


def test_a_custom_tool_is_answered_with_text(server: Answering, client: Client, terminal: Terminal) -> None:
    def wants_weather(server: Answering, input_id: str) -> None:
        server.publish(
            event("user.message", input_id, content=text("(as sent)")),
            event("agent.custom_tool_use", "sevt_call", name="weather", input={"city": "Oslo"}),
            idle("sevt_parked", "requires_action", "sevt_call"),
        )

    server.turns += [wants_weather, resolves]
    talk, asker = chat(client, terminal, "snow")
    assert talk.say("weather?").is_good
    assert asker.questions == ['Result of weather {"city": "Oslo"}: ']
    assert server.sent[1] == {
        "type": "user.custom_tool_result",
        "custom_tool_use_id": "sevt_call",
        "content": text("snow"),
    }


@pytest.mark.parametrize("lines", [[], [KeyboardInterrupt]])
def test_who_does_not_answer_leaves_the_session_waiting(
    server: Answering, client: Client, terminal: Terminal, lines: list[type[BaseException]]
) -> None:
    server.turns.append(asks_for_bash)
    talk, _ = chat(client, terminal, *lines)
    with pytest.raises(Left):
        talk.say("list")
    assert len(server.sent) == 1
    assert f"perdure chat --session {SESSION}" in terminal.err.getvalue()


def test_an_answer_that_came_too_late_is_told_and_the_turn_goes_on(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    server.turns.append(asks_for_bash)
    talk, asker = chat(client, terminal)

    def answered_by_another(question: str) -> str:
        del question
        server.refusals.append((400, {"type": "x", "message": "It was already answered."}))
        resolves(server, "")
        return "y"

    asker.ask = answered_by_another  # type: ignore[method-assign]
    assert talk.say("list").is_good
    assert "already answered" in terminal.err.getvalue()


def test_an_old_request_that_somebody_answered_is_not_asked_again(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    def parked_and_resolved(server: Answering, input_id: str) -> None:
        server.status = "running"
        asks_for_bash(server, input_id)
        resolves(server, input_id)

    server.turns.append(parked_and_resolved)
    talk, asker = chat(client, terminal)
    assert talk.say("list").is_good
    assert asker.questions == []


def test_a_session_that_waits_asks_when_one_comes_back_to_it(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    asks_for_bash(server, "sevt_in0")
    server.turns.append(resolves)
    talk, asker = chat(client, terminal, "y")
    rested = talk.resume()
    assert rested is not None
    assert rested.is_good
    assert len(asker.questions) == 1


def test_a_session_at_rest_has_nothing_to_resume(server: Answering, client: Client, terminal: Terminal) -> None:
    server.publish(idle("sevt_0"))
    talk, _ = chat(client, terminal)
    assert talk.resume() is None
    server.status = "terminated"
    with pytest.raises(CommandFailed, match="takes no more input"):
        talk.resume()


def ends_with(*rows: dict[str, object]) -> Turn:
    def turn(server: Answering, input_id: str) -> None:
        server.publish(event("user.message", input_id, content=text("(as sent)")), *rows)

    return turn


def failure(retry: str) -> dict[str, object]:
    error = {"type": "model_overloaded_error", "message": "Too busy.", "retry_status": {"type": retry}}
    return event("session.error", f"sevt_{retry}", error=error)


@pytest.mark.parametrize(
    ("rows", "ending"),
    [
        ([failure("retrying"), idle("sevt_i")], Ending("end_turn", None)),
        ([failure("exhausted"), idle("sevt_i", "retries_exhausted")], Ending("retries_exhausted", "Too busy.")),
        ([failure("terminal"), event("session.status_terminated", "sevt_t")], Ending("terminated", "Too busy.")),
        ([idle("sevt_i", "refusal")], Ending("refusal", None)),
        ([event("session.deleted", "sevt_d")], Ending("deleted", None)),
    ],
)
def test_how_a_turn_ended_is_known(
    server: Answering, client: Client, terminal: Terminal, rows: list[dict[str, object]], ending: Ending
) -> None:
    server.turns.append(ends_with(*rows))
    talk, _ = chat(client, terminal)
    assert talk.say("hi") == ending
    assert ending.is_good == (ending.reason == "end_turn")


def test_ctrl_c_interrupts_the_turn_and_the_stream_goes_on(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    def running(server: Answering, input_id: str) -> None:
        server.publish(event("session.status_running", "sevt_run"))
        server.turns.append(lambda server, _: ends_with(idle("sevt_end"))(server, input_id))
        os.kill(os.getpid(), signal.SIGINT)

    server.turns.append(running)
    talk, _ = chat(client, terminal)
    assert talk.say("hi") == Ending("interrupted", None)
    assert server.sent[1] == {"type": "user.interrupt"}


def test_a_second_ctrl_c_within_two_seconds_leaves_and_a_later_one_interrupts_again() -> None:
    now_s = 0.0
    before = signal.getsignal(signal.SIGINT)
    interrupts: list[float] = []
    with CtrlC(lambda: interrupts.append(now_s), clock=lambda: now_s) as ctrl_c:
        os.kill(os.getpid(), signal.SIGINT)
        now_s = 2.5
        os.kill(os.getpid(), signal.SIGINT)
        now_s = 4.0
        with pytest.raises(Left):
            os.kill(os.getpid(), signal.SIGINT)
        with ctrl_c.paused(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_lines_of_a_pipe_are_a_whole_chat(server: Answering, client: Client, terminal: Terminal) -> None:
    server.turns += [reply("one"), reply("two")]
    asker = LineAsker(io.StringIO("first\n\n  \nsecond"), terminal.err)
    talk = Chat(client, SESSION, terminal.screen(), asker)
    assert converse(talk, asker, terminal.screen()) == 0
    assert terminal.out.getvalue() == "one\ntwo\n"
    assert terminal.err.getvalue() == ""


def test_a_bad_end_fails_a_pipe_and_not_a_person(server: Answering, client: Client, terminal: Terminal) -> None:
    for is_interactive, code in ((False, 1), (True, 0)):
        server.turns.append(ends_with(idle("sevt_i", "refusal")))
        asker = Answers(["hi"], is_interactive=is_interactive)
        assert converse(Chat(client, SESSION, terminal.screen(), asker), asker, terminal.screen()) == code


def test_two_ctrl_c_at_the_prompt_leave(client: Client, terminal: Terminal) -> None:
    asker = Answers([KeyboardInterrupt, KeyboardInterrupt, "never asked"], is_interactive=True)
    talk = Chat(client, SESSION, terminal.screen(), asker)
    assert converse(talk, asker, terminal.screen(), clock=lambda: 0.0) == 0
    assert asker.lines == ["never asked"]


def test_json_shows_every_event_as_a_line(server: Answering, client: Client, terminal: Terminal) -> None:
    server.turns.append(reply("Paris"))
    Chat(client, SESSION, JsonScreen(terminal.out, terminal.err), Answers([])).say("hi")
    types = [json.loads(line)["type"] for line in terminal.out.getvalue().splitlines()]
    assert types[0] == "user.message"
    assert "event_delta" in types
    assert types[-1] == "session.status_idle"


def test_the_trail_has_one_line_for_each_event_and_none_for_previews(
    server: Answering, client: Client, terminal: Terminal
) -> None:
    server.turns.append(reply("Paris"))
    trail = Trail(terminal.screen())
    Chat(client, SESSION, trail, Answers([])).say("hi")
    lines = trail.lines()
    assert [line.split()[1] for line in lines] == [
        "user.message",
        "session.status_running",
        "agent.message",
        "user.message",
        "session.status_idle",
    ]
    assert lines[2].startswith("12:00:00.000  agent.message")
    assert lines[2].endswith("Paris")


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (Ending("end_turn", "Too busy."), "The turn ended: Too busy."),
        (Ending("interrupted", None), "The turn was interrupted."),
        (Ending("terminated", "Too busy."), "The session was terminated and takes no more input: Too busy."),
        (Ending("deleted", None), "The session was deleted."),
        (Ending("retries_exhausted", "Too busy."), "The turn was given up: Too busy."),
        (Ending("new_reason", None), "The turn ended with the reason new_reason."),
    ],
)
def test_an_end_is_told_in_a_sentence(ending: Ending, said: str) -> None:
    assert ending.explain() == said
