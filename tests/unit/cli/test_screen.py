"""Nothing that a model or a tool says steers the terminal, and long things are cut."""

from tests.unit.cli.answering import Json, event, text
from tests.unit.cli.conftest import Terminal

from perdure.cli.client import StreamEvent
from perdure.cli.screen import RESULT_LINES_MAX
from perdure.cli.text import harmless, one_line, text_of


def shown(data: Json) -> StreamEvent:
    return StreamEvent(None, data["type"], data)


def test_escape_sequences_do_not_reach_the_terminal(terminal: Terminal) -> None:
    screen = terminal.screen()
    screen.show(shown(event("agent.message", "sevt_1", content=text("a\x1b[2Jb\x07\u202ec"))))
    screen.show(shown(event("agent.tool_use", "sevt_2", name="ba\x1bsh", input={"command": "\x1b]0;x\x07"})))
    screen.show(
        shown(event("agent.tool_result", "sevt_3", tool_use_id="sevt_2", content=text("\x1b[31mred"), is_error=True))
    )
    assert not set("\x1b\x07\u202e") & set(terminal.out.getvalue())


def test_text_keeps_its_lines_and_tabs() -> None:
    assert harmless("a\r\nb\tc\n") == "a\nb\tc\n"
    assert one_line("  a\n\tb  ") == "a b"
    assert one_line("x" * 500, 10) == "x" * 9 + "…"


def test_a_long_result_is_cut_and_says_so(terminal: Terminal) -> None:
    lines = "\n".join(str(n) for n in range(RESULT_LINES_MAX + 5))
    result = event("agent.tool_result", "sevt_1", tool_use_id="sevt_0", content=text(lines), is_error=False)
    terminal.screen().show(shown(result))
    assert terminal.out.getvalue().splitlines()[-1] == "  (5 more lines)"


def test_a_result_names_its_tool_though_another_came_in_between(terminal: Terminal) -> None:
    screen = terminal.screen()
    for number, name in ((1, "bash"), (2, "read")):
        screen.show(shown(event("agent.tool_use", f"sevt_{number}", name=name, input={})))
    for number, is_error in ((2, False), (1, True), (9, False)):
        result = event("agent.tool_result", f"sevt_r{number}", tool_use_id=f"sevt_{number}", is_error=is_error)
        screen.show(shown(result))
    lines = [line for line in terminal.out.getvalue().splitlines() if line.startswith("\N{LEFTWARDS ARROW}")]
    assert [line[2:] for line in lines] == ["read", "bash failed", "a tool"]


def test_a_preview_that_never_became_a_message_ends_its_line(terminal: Terminal) -> None:
    screen = terminal.screen()
    screen.show(shown({"type": "event_start", "event": {"type": "agent.message", "id": "sevt_1"}}))
    delta = {"delta": {"content": {"text": "half a"}}}
    screen.show(shown({"type": "event_delta", "event_id": "sevt_1", **delta}))
    screen.show(shown({"type": "event_delta", "event_id": "sevt_other", **delta}))
    screen.show(shown(event("agent.message", "sevt_2", content=text("Whole."))))
    assert terminal.out.getvalue() == "half a\nWhole.\n"


def test_blocks_without_text_are_named() -> None:
    assert text_of([{"type": "text", "text": "see"}, {"type": "image", "source": {}}]) == "see\n[image]"
    assert text_of(None) == ""
