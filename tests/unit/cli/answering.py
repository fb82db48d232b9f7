"""A small HTTP server that answers like Perdure, as far as the command line asks: one session, with turns that a test wrote."""

import json
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
KEY = "pk_test"
SESSION = "sesn_one"
AT = "2026-12-01T12:00:00.000000Z"
WAIT_S = 5.0
PREVIEWS = ("event_start", "event_delta")

Turn = Callable[["Answering", str], None]
"""Publishes what a send of these events causes; gets the id of the first one."""


@dataclass
class Answering:
    """What the server knows, and what it was asked."""

    url: str = ""
    status: str = "idle"
    turns: list[Turn] = field(default_factory=list[Turn])
    refusals: list[tuple[int, Json]] = field(default_factory=list[tuple[int, Json]])
    """Answers to the next POSTs, instead of what they ask."""
    refusal: tuple[int, Json] | None = None
    """What every GET is answered with from now on."""
    unknown_models: tuple[str, ...] = ()
    agents: list[Json] = field(default_factory=list[Json])
    environments: list[Json] = field(default_factory=list[Json])
    """What lists show, in their order; an agent can be retrieved too."""
    sent: list[Json] = field(default_factory=list[Json])
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list[tuple[str, str, dict[str, str]]])
    bodies: list[Json] = field(default_factory=list[Json])
    frames: list[Json] = field(default_factory=list[Json])
    resumed_from: list[str | None] = field(default_factory=list[str | None])
    changed: threading.Condition = field(default_factory=threading.Condition)
    streams: int = 0
    """Open ones."""
    cuts: int = 0
    """How often all open streams were cut."""
    stopping: bool = False
    inputs: int = 0

    def publish(self, *events: Json) -> None:
        """Commit events, in order; streams get them."""
        with self.changed:
            self.frames += events
            self.changed.notify_all()

    def cut(self) -> None:
        """Break every open stream behind what was published so far."""
        with self.changed:
            self.cuts += 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.streams == 0, WAIT_S)

    def persisted(self) -> list[Json]:
        """What a list shows."""
        return [frame for frame in self.frames if frame["type"] not in PREVIEWS]


def event(kind: str, identity: str, **fields: Any) -> Json:
    return {"id": identity, "type": kind, "processed_at": AT, **fields}


def text(value: str) -> list[Json]:
    return [{"type": "text", "text": value}]


def idle(identity: str, reason: str = "end_turn", *action_ids: str) -> Json:
    stop: Json = {"type": reason, "event_ids": list(action_ids)} if action_ids else {"type": reason}
    return event("session.status_idle", identity, stop_reason=stop, stop_details=None)


def reply(words: str) -> Turn:
    """A turn that says something, with previews."""

    def turn(server: Answering, input_id: str) -> None:
        n = server.inputs
        said = f"sevt_said{n}"
        half = len(words) // 2
        server.publish(
            event("session.status_running", f"sevt_run{n}"),
            {"type": "event_start", "event": {"type": "agent.message", "id": said}},
            *(
                {"type": "event_delta", "event_id": said, "delta": {"content": {"text": part}}}
                for part in _parts(words[:half])
            ),
            event("agent.message", said, content=text(words)),
            event("user.message", input_id, content=text("(as sent)")),
            idle(f"sevt_idle{n}"),
        )

    return turn


def _parts(words: str) -> list[str]:
    return [words[i : i + 3] for i in range(0, len(words), 3)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        state, path, query = self._begin()
        if self.headers["authorization"] != f"Bearer {KEY}":
            self._refuse(401, "authentication_error", "The API key is not valid.", None)
        elif state.refusal is not None:
            self._answer({"type": "error", "error": state.refusal[1]}, state.refusal[0])
        elif path.endswith("/events/stream"):
            self._stream(state)
        elif path.endswith("/events"):
            types = query.get("types[]", [])
            rows = [frame for frame in state.persisted() if frame["type"] in types]
            if query.get("order") == ["desc"]:
                rows.reverse()
            self._answer({"data": rows[: int(query.get("limit", ["1000"])[0])]})
        elif path in ("/v1/agents", "/v1/environments"):
            rows = state.agents if path == "/v1/agents" else state.environments
            begin, count = int(query.get("page", ["0"])[0]), int(query["limit"][0])
            end = begin + count
            self._answer({"data": rows[begin:end], "next_page": str(end) if len(rows) > end else None})
        elif path.startswith("/v1/agents/"):
            found = next((agent for agent in state.agents if agent["id"] == path.rpartition("/")[2]), None)
            if found is None:
                self._refuse(404, "not_found_error", "Agent not found.", "agent_not_found")
            else:
                self._answer(found)
        elif path.startswith("/v1/sessions/") and path != f"/v1/sessions/{SESSION}":
            self._refuse(404, "not_found_error", "Session not found.", "session_not_found")
        elif path == f"/v1/sessions/{SESSION}":
            self._answer(_session(state))
        elif path == "/v1/sessions":
            self._answer({"data": [_session(state)], "next_page": None})
        elif path.endswith("/inputs"):
            self._answer(
                {"data": [{"id": "sevt_in", "type": "input", "kind": "message", "state": "waiting", "reason": None}]}
            )
        else:
            self._answer({"data": []})

    def do_POST(self) -> None:
        state, path, _ = self._begin()
        body: Json = json.loads(self.rfile.read(int(self.headers["content-length"])))
        state.bodies.append(body)
        if state.refusals:
            status, error = state.refusals.pop(0)
            self._answer({"type": "error", "error": error}, status)
        elif path.endswith("/events"):
            self._take(state, body["events"])
        elif path.endswith("/withdraw"):
            self._answer({"id": path.split("/")[-2], "type": "input_withdrawn"})
        elif path == "/v1/sessions" and body["agent"].get("model") in state.unknown_models:
            self._refuse(400, "invalid_request_error", "agent.model: no provider", "model_unknown")
        elif path == "/v1/sessions":
            self._answer(_session(state, body["agent"].get("model", "the agent's"), body["agent"].get("tools", [])))
        elif path == f"/v1/sessions/{SESSION}/archive":
            self._answer({**_session(state), "archived_at": AT})
        else:
            self._answer({"id": "agent_one" if path == "/v1/agents" else "env_one"})

    def _begin(self) -> tuple[Answering, str, dict[str, list[str]]]:
        state, parts = self.server.state, urlsplit(self.path)
        state.requests.append((self.command, parts.path, {k.lower(): v for k, v in self.headers.items()}))
        return state, parts.path, parse_qs(parts.query)

    def _take(self, state: Answering, events: list[Json]) -> None:
        state.sent += events
        state.inputs += 1
        rows = [{**given, "id": f"sevt_in{state.inputs}", "processed_at": None} for given in events]
        state.publish(*rows)
        # Published before the answer is there, which is the harder order for a client.
        if state.turns:
            state.turns.pop(0)(state, rows[0]["id"])
        self._answer({"data": rows})

    def _stream(self, state: Answering) -> None:
        after = self.headers.get("last-event-id")
        state.resumed_from.append(after)
        # The place comes before the headers: what is published once they are read is on the stream.
        with state.changed:
            place = len(state.frames) if after is None else int(after.partition(".")[0]) - 1
            cuts = state.cuts
            state.streams += 1
            state.changed.notify_all()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        self._write(b": open\n\n")
        while True:
            with state.changed:
                while len(state.frames) <= place and not state.stopping and state.cuts == cuts:
                    assert state.changed.wait(WAIT_S), "nothing was published for too long"
                batch = state.frames[place:]
                is_over = state.stopping or state.cuts > cuts
            for frame in batch:
                place += 1
                cursor = "" if frame["type"] in PREVIEWS else f"id: {place + 1}.0\n"
                self._write(f"event: {frame['type']}\n{cursor}data: {json.dumps(frame)}\n\n".encode())
            if is_over:
                with state.changed:
                    state.streams -= 1
                    state.changed.notify_all()
                return

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _refuse(self, status: int, kind: str, message: str, code: str | None) -> None:
        error = {"type": kind, "message": message, "details": {"error_code": code}}
        self._answer({"type": "error", "error": error}, status)

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("request-id", "req_1")
        self.end_headers()
        self._write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: Answering) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _session(state: Answering, model: str = "scripted/demo", tools: Sequence[Json] = ()) -> Json:
    return {
        "id": SESSION,
        "type": "session",
        "status": state.status,
        "title": "A title",
        "agent": {"id": "agent_one", "version": 3, "name": "A name", "model": {"id": model}, "tools": list(tools)},
        "environment_id": "env_one",
        "metadata": {},
        "usage": {"input_tokens": 12, "output_tokens": 3},
        "created_at": AT,
        "updated_at": AT,
        "archived_at": None,
    }


@contextmanager
def answering() -> Generator[Answering]:
    """Serve until the block ends."""
    state = Answering()
    server = _Server(state)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        with state.changed:
            state.stopping = True
            state.changed.notify_all()
        server.shutdown()
        thread.join()
        server.server_close()
