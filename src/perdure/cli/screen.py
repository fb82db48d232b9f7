"""What a session's events look like on a terminal, and as JSON lines for programs."""

import json
from typing import Any, Final, Protocol, TextIO

from perdure.cli.client import Json, StreamEvent
from perdure.cli.following import PREVIEW_TYPES
from perdure.cli.text import compact, harmless, one_line, text_of

RESULT_LINES_MAX: Final = 8
"""Lines of a tool's result that are shown; the events have all of it."""

_CALLS: Final = frozenset({"agent.tool_use", "agent.custom_tool_use"})
_DIM: Final = "2"
_RED: Final = "31"
_CYAN: Final = "36"


class Screen(Protocol):
    """Shows events as they come, and what the command itself has to say."""

    def show(self, event: StreamEvent) -> None:
        """One event, in order."""
        ...

    def tell(self, text: str) -> None:
        """One line about what goes on, that is no part of the session."""
        ...

    def own(self, event_id: str) -> None:
        """An input that the person just typed: no need to show it."""
        ...


class JsonScreen:
    """Each event is a line of JSON; previews too, for those who want to stream on."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err

    def show(self, event: StreamEvent) -> None:
        """See `Screen`."""
        self._out.write(json.dumps(event.data, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._out.flush()

    def tell(self, text: str) -> None:
        """To standard error, so that standard output stays JSON."""
        self._err.write(harmless(text) + "\n")
        self._err.flush()

    def own(self, event_id: str) -> None:
        """Nothing is hidden here."""
        del event_id


class TextScreen:
    """The reply on standard output as it is written, everything around it short; notes on standard error."""

    def __init__(self, out: TextIO, err: TextIO, *, colour: bool) -> None:
        self._out = out
        self._err = err
        self._colour = colour
        self._own: set[str] = set()
        self._tools: dict[str, str] = {}
        self._preview_id: str | None = None
        self._shown = ""
        self._mid_line = False

    def show(self, event: StreamEvent) -> None:
        """See `Screen`."""
        data = event.data
        match event.type:
            case "event_start":
                self._preview_id, self._shown = str(data["event"]["id"]), ""
            case "event_delta":
                self._show_delta(data)
            case "agent.message":
                self._show_message(data)
            case "agent.tool_use" | "agent.custom_tool_use":
                name = self._tools[str(data["id"])] = one_line(str(data["name"]))
                self._line(f"\N{RIGHTWARDS ARROW} {name} {one_line(compact(data['input']))}", _CYAN)
            case "agent.tool_result":
                self._show_result(data)
            case "user.message":
                self._show_input(data)
            case "session.error":
                error: Json = data["error"]
                retry = str(error["retry_status"]["type"])
                self._line(f"! {harmless(str(error['message']))} ({retry})", _RED)
            case "session.status_idle" | "session.status_terminated" | "session.status_rescheduled":
                self._finish_line()
            case _:
                pass

    def tell(self, text: str) -> None:
        """See `Screen`."""
        self._finish_line()
        self._err.write(self._styled(harmless(text), _DIM) + "\n")
        self._err.flush()

    def own(self, event_id: str) -> None:
        """See `Screen`."""
        self._own.add(event_id)

    def _show_delta(self, data: Json) -> None:
        if data["event_id"] != self._preview_id:
            return
        text = str(data["delta"]["content"]["text"])
        self._shown += text
        self._write(text)

    def _show_message(self, data: Json) -> None:
        """What the preview did not show yet: all of it when there was none."""
        text = text_of(data["content"])
        if data["id"] == self._preview_id and text.startswith(self._shown):
            text = text[len(self._shown) :]
        else:
            self._finish_line()
        self._preview_id, self._shown = None, ""
        self._write(text)
        self._finish_line()

    def _show_result(self, data: Json) -> None:
        lines = harmless(text_of(data.get("content"))).splitlines() or ["(nothing)"]
        shown = lines[:RESULT_LINES_MAX]
        if len(lines) > len(shown):
            shown.append(f"({len(lines) - len(shown)} more lines)")
        colour = _RED if data.get("is_error") else _DIM
        # A call from before this screen was there has no name here.
        name = self._tools.get(str(data["tool_use_id"]), "a tool")
        self._line(f"\N{LEFTWARDS ARROW} {name}{' failed' if data.get('is_error') else ''}", colour)
        for line in shown:
            self._line("  " + line, colour)

    def _show_input(self, data: Json) -> None:
        if data["id"] in self._own:
            return
        self._own.add(str(data["id"]))
        self._line(f"> {one_line(text_of(data['content']))}", _DIM)

    def _line(self, text: str, colour: str) -> None:
        self._finish_line()
        self._out.write(self._styled(text, colour) + "\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        if not text:
            return
        self._out.write(harmless(text))
        self._out.flush()
        self._mid_line = not text.endswith("\n")

    def _finish_line(self) -> None:
        if self._mid_line:
            self._out.write("\n")
            self._out.flush()
            self._mid_line = False

    def _styled(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour else text


class Trail:
    """Keeps what a screen shows, to print it once more as a list of events."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._events: list[Json] = []

    def show(self, event: StreamEvent) -> None:
        """See `Screen`."""
        if event.type not in PREVIEW_TYPES:
            self._events.append(event.data)
        self._screen.show(event)

    def tell(self, text: str) -> None:
        """See `Screen`."""
        self._screen.tell(text)

    def own(self, event_id: str) -> None:
        """See `Screen`."""
        self._screen.own(event_id)

    def lines(self) -> list[str]:
        """One line an event: time, type, a short detail."""
        tools = {str(d["id"]): str(d["name"]) for d in self._events if d["type"] in _CALLS}
        return [f"{_clock(data)}  {data['type']!s:<34} {_detail(data, tools)}".rstrip() for data in self._events]


def _clock(data: Json) -> str:
    """The time of day in UTC, to the millisecond; an input that waits has none yet."""
    at = data.get("processed_at")
    return str(at)[11:23] if isinstance(at, str) else "(waiting)   "


def _detail(data: Json, tools: dict[str, str]) -> str:
    kind = str(data["type"])
    match kind:
        case "user.message" | "system.message" | "agent.message":
            return one_line(text_of(data["content"]))
        case "agent.tool_use" | "agent.custom_tool_use":
            return one_line(f"{data['name']} {compact(data['input'])}")
        case "agent.tool_result" | "user.custom_tool_result":
            name = tools.get(str(data.get("tool_use_id") or data.get("custom_tool_use_id")), "a tool")
            return one_line(f"{name}{' failed' if data.get('is_error') else ''}: {text_of(data.get('content'))}")
        case "user.tool_confirmation":
            return str(data["result"])
        case "session.status_idle" | "session.thread_status_idle":
            return str(data["stop_reason"]["type"])
        case "session.error":
            error: Json = data["error"]
            return one_line(f"{error['type']}, {error['retry_status']['type']}: {error['message']}")
        case "span.model_request_end":
            return _usage(data["model_usage"])
        case "session.usage":
            return _usage(data["usage"])
        case _:
            return ""


def _usage(usage: Any) -> str:
    return f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out"
