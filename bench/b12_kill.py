"""B12: SIGKILL at random points of every phase of a turn, and what is left of it after a restart.

A turn here is a message, a model's call that streams for 1.5 s and asks for a tool, the tool, and a second call that says the end. The
server's process is killed; PostgreSQL goes on, as it does when a process is killed for want of memory. Then the server is started again
and nobody does anything, except that a client whose request was never answered sends it again, as the client libraries do.
"""

import http.client
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from bench import floor, subject
from bench.api import Api, ApiFailed, message
from bench.pairs import Figure
from bench.run import Size
from perdure.testing.model_server import Call, ModelServerThread, RecordedRequest, Reply, Text

Phase: TypeAlias = Literal["admit", "claim", "model", "tool", "finish"]

MODEL = "claude-sonnet-4-5"
MODEL_S = 1.5
DELTAS = 10
TOOL_S = 0.4
RESUME_MAX_S = 3.0
DEADLINE_S = 45.0
"""A turn that did not go on by then never will."""

WINDOWS_S: dict[Phase, float] = {"admit": 0.015, "claim": 0.05, "model": MODEL_S, "tool": TOOL_S, "finish": 0.06}
"""How long each phase takes, about: the kill falls at random into it."""


@dataclass
class Calls:
    """When the model was asked about which turn."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: list[tuple[str, float, RecordedRequest]] = field(default_factory=list[tuple[str, float, RecordedRequest]])

    def note(self, marker: str, request: RecordedRequest) -> None:
        """Asked now."""
        with self.lock:
            self.asked.append((marker, time.monotonic(), request))

    def of(self, marker: str) -> list[tuple[float, RecordedRequest]]:
        """The calls of a turn, in order."""
        with self.lock:
            return [(at, request) for m, at, request in self.asked if m == marker]


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of one turn."""

    phase: Phase
    acked: bool
    lost: int
    doubled_inputs: int
    doubled_replies: int
    repeated_tools: int
    finished: bool
    was_over: bool
    """It had ended before the kill."""
    resume_s: float | None
    """From the first answer of /readyz until the model was asked again."""
    restart_s: float


def measure(size: Size) -> list[Figure]:
    """Every phase, so many kills each."""
    calls = Calls()
    fates: list[Fate] = []
    with ModelServerThread() as model, subject.data_folder() as data:
        model.server.respond_with(lambda request: respond(calls, request))
        trial = Trial(subject_settings(data, model.base_url), calls)
        try:
            for number in range(size.kills):
                fates += [trial.run(phase, f"marker-{phase}-{number:03d}") for phase in get_args(Phase)]
        finally:
            trial.end()
        disk_ms = floor.fdatasync_ms(data)
    return figures_of(fates, disk_ms)


def subject_settings(data: Any, base_url: str) -> dict[str, Any]:
    """A single server with a worker, its tools in the sandbox where one holds."""
    return {"data": data, "anthropic_base_url": base_url, "unsafe_no_sandbox": True}


def respond(calls: Calls, request: RecordedRequest) -> Reply:
    """The model: first it asks for the tool, then it says that it is done. 1.5 s each, in pieces."""
    marker = marker_of(request.body)
    calls.note(marker, request)
    said = "done" if _is_tool_result(request.body["messages"][-1]) else "working on"
    text = f"{said} {marker}".ljust(DELTAS * 16, ".")
    pause_ms = int(MODEL_S * 1000 / DELTAS)
    if said == "done":
        return Reply(Text(text), delay_ms=pause_ms)
    command = f"echo {marker} >> ran.txt; sleep {TOOL_S}; echo ran"
    return Reply(Text(text), Call("bash", {"command": command}), delay_ms=pause_ms, chunk_chars=16)


def marker_of(body: dict[str, Any]) -> str:
    """The turn that a request belongs to: the last text of the user."""
    for entry in reversed(body["messages"]):
        content = entry["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in reversed(blocks):
            if entry["role"] == "user" and block["type"] == "text" and "marker-" in block["text"]:
                return str(block["text"]).split()[-1]
    return ""


def _is_tool_result(entry: dict[str, Any]) -> bool:
    content = entry["content"]
    return not isinstance(content, str) and any(block["type"] == "tool_result" for block in content)


class Trial:
    """One server, killed and started again and again on the same data and port."""

    def __init__(self, settings: dict[str, Any], calls: Calls) -> None:
        self._settings = {k: v for k, v in settings.items() if k != "data"}
        self._data = settings["data"]
        self._calls = calls
        self._port = subject.free_port()
        self._subject = self._start()
        api = Api(self._subject.url, self._subject.api_key)
        self._parts = api.make_agent(MODEL, tools=True)
        api.close()

    def _start(self) -> subject.Subject:
        return subject.start(self._data, worker=True, port=self._port, settings=self._settings)

    def end(self) -> None:
        """Stop the last server."""
        subject.stop(self._subject)

    def run(self, phase: Phase, marker: str) -> Fate:
        """One turn, killed in a phase."""
        api = Api(self._subject.url, self._subject.api_key)
        session = api.make_sessions(self._parts, 1)[0]
        kill_in_s = random.uniform(0, WINDOWS_S[phase])
        acked = self._send_and_kill(phase, session, marker, kill_in_s)
        killed_at = time.monotonic()
        over = _is_over(self._calls, marker)
        self._subject = self._start()
        api = Api(self._subject.url, self._subject.api_key)
        ready_at = _await_ready(api)
        if not acked:
            # As the client libraries do. Whether the first one was kept is for the server to know.
            again = {"x-stainless-retry-count": "1"}
            api.call("POST", f"/v1/sessions/{session}/events", message(f"do {marker}"), again)
        finished = _await_idle(api, session, marker)
        return self._judge(api, session, marker, phase=phase, acked=acked, finished=finished, was_over=over,
                           killed_at=killed_at, ready_at=ready_at)  # fmt: skip

    def _send_and_kill(self, phase: Phase, session: str, marker: str, kill_in_s: float) -> bool:
        """Send the message and kill the server in time; whether the message was acknowledged."""
        acked = threading.Event()

        def send() -> None:
            own = Api(self._subject.url, self._subject.api_key)
            try:
                own.call("POST", f"/v1/sessions/{session}/events", message(f"do {marker}"))
                acked.set()
            except (OSError, http.client.HTTPException, ApiFailed):
                pass
            finally:
                own.close()

        sender = threading.Thread(target=send)
        sender.start()
        if phase != "admit":
            sender.join()
        if phase in ("model", "tool", "finish"):
            self._await_call(marker, phase)
        time.sleep(kill_in_s)
        self._subject.process.kill()
        self._subject.process.wait()
        sender.join()
        return acked.is_set()

    def _await_call(self, marker: str, phase: Phase) -> None:
        """Return when a phase begins."""
        until = time.monotonic() + DEADLINE_S
        wanted = 2 if phase == "finish" else 1
        while len(found := self._calls.of(marker)) < wanted:
            if time.monotonic() > until:
                raise RuntimeError(f"the turn of {marker} did not get to its phase {phase}")
            time.sleep(0.002)
        if phase != "model":
            found[wanted - 1][1].ended.wait_blocking(DEADLINE_S)

    def _judge(
        self, api: Api, session: str, marker: str, *, phase: Phase, acked: bool, finished: bool, was_over: bool,
        killed_at: float, ready_at: float,
    ) -> Fate:  # fmt: skip
        events = list(api.events(session))
        api.close()
        inputs = sum(1 for e in events if e["type"] == "user.message")
        said = [e["content"][0]["text"].split(".")[0] for e in events if e["type"] == "agent.message" and e["content"]]
        ran = [line for path in self._data.rglob("ran.txt") for line in path.read_text().split() if line == marker]
        resumed = [at for at, _ in self._calls.of(marker) if at > killed_at]
        return Fate(
            phase=phase,
            acked=acked,
            lost=int(acked and inputs == 0),
            doubled_inputs=max(0, inputs - 1),
            doubled_replies=len(said) - len(set(said)),
            repeated_tools=max(0, len(ran) - 1),
            finished=finished,
            was_over=was_over,
            resume_s=max(0.0, resumed[0] - ready_at) if resumed and acked else None,
            restart_s=ready_at - killed_at,
        )


def _is_over(calls: Calls, marker: str) -> bool:
    found = calls.of(marker)
    return len(found) > 1 and found[-1][1].ended.is_set() and not found[-1][1].cancelled


def _await_ready(api: Api) -> float:
    """When /readyz answered 200 for the first time."""
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            api.call("GET", "/readyz")
            return time.monotonic()
        except (OSError, http.client.HTTPException, ApiFailed):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _await_idle(api: Api, session: str, marker: str) -> bool:
    """Whether the turn came to its end."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        events = api.events(session)
        said = any(e["type"] == "agent.message" and f"done {marker}" in e["content"][0]["text"] for e in events)
        if said and api.call("GET", f"/v1/sessions/{session}")["status"] == "idle":
            return True
        time.sleep(0.05)
    return False


def figures_of(fates: list[Fate], disk_ms: float) -> list[Figure]:
    """The table's lines."""
    kills = len(fates)
    acked = [f for f in fates if f.acked]
    resumes = [f.resume_s for f in fates if f.resume_s is not None]
    in_phase = ", ".join(f"{p} {sum(f.phase == p for f in fates)}" for p in get_args(Phase))
    raw = {"fates": [vars(f) for f in fates]}
    share = 100.0 * sum(f.finished for f in acked) / max(1, len(acked))
    unacked = kills - len(acked)
    figures = [
        Figure(bench="B12", name="acknowledged inputs lost", value=sum(f.lost for f in fates), target=0,
               detail=f"{kills} kills: {in_phase}; {len(acked)} acknowledged", raw=raw),
        Figure(bench="B12", name="inputs doubled by a retry", value=sum(f.doubled_inputs for f in fates), target=0,
               detail=f"{unacked} were sent again, because no answer had come"),
        Figure(bench="B12", name="replies doubled", value=sum(f.doubled_replies for f in fates), target=0),
        Figure(bench="B12", name="tools repeated", value=sum(f.repeated_tools for f in fates), target=0),
        Figure(bench="B12", name="turns that went on", value=share, target=100, sense="at least", unit="%"),
    ]  # fmt: skip
    if resumes:
        restarts = statistics.median(f.restart_s for f in fates)
        detail = f"median {statistics.median(resumes):.2f} s of {len(resumes)}; kill to /readyz {restarts:.2f} s"
        figures.append(
            Figure(bench="B12", name="/readyz until it went on, worst", value=max(resumes), target=RESUME_MAX_S,
                   unit="s", disk_ms=disk_ms, detail=detail)
        )  # fmt: skip
    return figures
