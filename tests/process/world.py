"""A world for processes that die: one database, one provider, clients that send again what got no answer, and the checker over it all."""

import asyncio
import json
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID, uuid4

from perdure.domain import ids
from perdure.http.claude.wire import SESSION, from_wire_id
from perdure.postgres.pool import ReadPool
from perdure.testing.checker import Checker, check_requests, read_effects
from perdure.testing.model_server import Call, Gate, ModelServerThread, RecordedRequest, Reply, Text
from perdure.testing.processes import Answer, Child, Cut, Json, Verb, until

MODEL = "claude-opus-5"
TOOL_SET = "agent_toolset_20260401"
DECIDE = {"type": "custom", "name": "decide", "description": "The client decides.", "input_schema": {"type": "object"}}

DEADLINE_S = 30.0
RECOVERY_S = 3.0
"""The promise."""
RECOVERY_S_MAX = 10.0
"""What a test insists on: the machine may be busy with other things."""

LONG = bool(os.environ.get("PERDURE_LONG"))
SEEDS = range(20) if LONG else range(3)

_PLAN = re.compile(r"plan:(\w+):(\w+)")


def plan_of(body: Json) -> tuple[str, str, int]:
    """What the last message asks for, its name, and how many replies it got so far."""
    kind, name, steps = "talk", "", 0
    for entry in body["messages"]:
        if entry["role"] == "assistant":
            steps += 1
            continue
        for block in entry["content"]:
            found = _PLAN.fullmatch(block.get("text", "")) if block["type"] == "text" else None
            if found is not None:
                kind, name, steps = found[1], found[2], 0
    return kind, name, steps


class Script:
    """The model. It reads what it shall do from the message that it answers, so no restart can confuse it."""

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        """By name of a plan, held there once, the first time that it is asked for; or by name and reply, as `a-1`."""
        self.calls: dict[str, int] = defaultdict(int)
        """By name and reply, how often it was asked."""

    def __call__(self, request: RecordedRequest) -> Reply:
        kind, name, steps = plan_of(request.body)
        self.calls[f"{name}-{steps}"] += 1
        gate = self.gates.pop(name, None) or self.gates.pop(f"{name}-{steps}", None)
        commands = {
            "tool": f"echo {name} >> effects",
            "slowtool": f"echo {name} >> effects; sleep 1.5",
            "twotools": f"echo {name}{steps} >> effects",
            "longtool": f"echo {name} >> effects; sleep 12",
        }
        if kind == "park" and steps == 0:
            return Reply(Call("decide", {"about": name}), gate=gate)
        if kind in commands and steps < (2 if kind == "twotools" else 1):
            return Reply(Call("bash", {"command": commands[kind]}), gate=gate)
        return Reply(Text(f"done {name}"), gate=gate)


class World:
    """The database, the provider, the processes, and what is known for certain."""

    def __init__(self, database_url: str | None, folder: Path, provider: ModelServerThread) -> None:
        self.database_url = database_url
        self.data = folder / "site"
        self.folder = folder
        self.provider = provider
        self.script = Script()
        provider.server.respond_with(self.script)
        self.first_request = len(provider.server.requests)
        self.children: list[Child] = []
        self.server: Child | None = None
        self.back = asyncio.Event()
        """Set while there is a server to talk to."""
        self.recoveries_s: dict[str, float] = {}
        self._agents: dict[str, str] = {}
        self._checker: Checker | None = None
        self._pool: ReadPool | None = None
        self.workspaces: dict[UUID, str] = {}
        self._checked: set[UUID] = set()

    @property
    def checker(self) -> Checker:
        if self._checker is None:
            self._checker = Checker(self.any_database_url)
        return self._checker

    @property
    def pool(self) -> ReadPool:
        if self._pool is None:
            self._pool = ReadPool(self.any_database_url, application_name="test")
        return self._pool

    @property
    def any_database_url(self) -> str:
        """The database's address, also of an embedded one."""
        if self.database_url is not None:
            return self.database_url
        return str(json.loads((self.data / "credentials.json").read_text())["database_url"])

    def child(self, verb: Verb, *, crash_at: str = "", **settings: str) -> Child:
        """A process that this world will clean up."""
        child = Child(
            verb,
            self.data,
            database_url=self.database_url,
            provider_url=self.provider.base_url,
            crash_at=crash_at,
            settings=settings,
        )
        self.children.append(child)
        return child

    async def serve(self, verb: Verb = "up", *, crash_at: str = "", **settings: str) -> Child:
        """A process with an API that clients talk to from now on."""
        self.server = await self.child(verb, crash_at=crash_at, **settings).start()
        self.back.set()
        return self.server

    async def terminate(self) -> int:
        """SIGTERM for the server; its exit code."""
        assert self.server is not None
        self.gone()
        return await self.server.terminate()

    def token_of(self, session: str) -> str:
        """The name of a session's workspace."""
        return ids.token(uuid_of(session))

    async def answered(self, *names: str) -> None:
        """Wait until the provider is through with its first answer to each of these plans."""
        for request in list(self.provider.server.requests[self.first_request :]):
            if plan_of(request.body)[1] in names:
                await request.ended.wait(DEADLINE_S)

    def gone(self) -> None:
        """There is no server: clients wait."""
        self.back.clear()

    async def close(self) -> None:
        for child in self.children:
            await child.close()
        if self._checker is not None:
            await self._checker.close()
        if self._pool is not None:
            await self._pool.close()

    # ---------------------------------------------------------------------------------------------------------- clients

    async def request(self, method: str, path: str, body: Json | None = None) -> Answer:
        """Sent until it is answered, always with the same key: through crashes, restarts and outages."""
        headers = {"idempotency_key": str(uuid4())} if method == "POST" else {}

        async def once() -> Answer | None:
            await self.back.wait()
            assert self.server is not None
            try:
                answer = await self.server.api.call(method, path, body, **headers)
            except Cut:
                return None
            return None if answer.status == 503 else answer

        answer = await until(once, DEADLINE_S * 2)
        assert isinstance(answer, Answer)
        return answer

    async def agent(self, policy: str = "always_allow") -> str:
        """An agent with every tool, made once."""
        if policy not in self._agents:
            tools = [{"type": TOOL_SET, "default_config": {"permission_policy": {"type": policy}}}, DECIDE]
            body = {"name": "agent", "model": MODEL, "tools": tools}
            self._agents[policy] = (await self.request("POST", "/v1/agents", body)).ok()["id"]
        return self._agents[policy]

    async def session(self, policy: str = "always_allow") -> str:
        """A new session."""
        if "environment" not in self._agents:
            made = await self.request("POST", "/v1/environments", {"name": "environment"})
            self._agents["environment"] = made.ok()["id"]
        body = {"agent": await self.agent(policy), "environment_id": self._agents["environment"]}
        session = (await self.request("POST", "/v1/sessions", body)).ok()["id"]
        self.workspaces[uuid_of(session)] = session
        return session

    async def send(self, session: str, *events: Json) -> list[Json]:
        """Events, acknowledged."""
        answer = (await self.request("POST", f"/v1/sessions/{session}/events", {"events": list(events)})).ok()
        for event in answer["data"]:
            self.checker.acknowledge(uuid_of(session), event["id"])
        return answer["data"]

    async def say(self, session: str, kind: str, name: str) -> list[Json]:
        """A message that tells the model what to do."""
        return await self.send(session, plan(kind, name))

    async def listed(self, session: str) -> list[Json]:
        """Every event."""
        found: list[Json] = []
        page = ""
        while True:
            answer = (await self.request("GET", f"/v1/sessions/{session}/events?limit=1000{page}")).ok()
            found += answer["data"]
            if not answer.get("next_page"):
                return found
            page = f"&page={answer['next_page']}"

    async def at_rest(self, session: str) -> str:
        """Wait until the session is idle; why it is."""

        async def rests() -> str | None:
            answer = (await self.request("GET", f"/v1/sessions/{session}")).ok()
            if answer["status"] != "idle":
                return None
            events = await self.listed(session)
            last = events[-1] if events else {}
            return last["stop_reason"]["type"] if last.get("type") == "session.status_idle" else None

        return str(await until(rests, DEADLINE_S * 2))

    async def drive(self, kind: str, name: str) -> None:
        """One client with one session, from its creation to its end."""
        session = await self.session()
        await self.say(session, "talk" if kind == "delete" else kind, name)
        if kind == "delete":
            await self.at_rest(session)
            answer = await self.request("DELETE", f"/v1/sessions/{session}")
            assert answer.status in (200, 404), answer.body
            assert (await self.request("GET", f"/v1/sessions/{session}")).status == 404
            self.checker.acknowledged.pop(uuid_of(session), None)
            return
        if kind == "park":
            assert await self.at_rest(session) == "requires_action"
            await self.answer(session, f"answer {name}")
        else:
            await self.say(session, "talk", f"{name}b")
        await self.at_rest(session)

    async def answer(self, session: str, text: str) -> None:
        """Give the client's result to the one open action."""
        calls = [e for e in await self.listed(session) if e["type"] == "agent.custom_tool_use"]
        content = [{"type": "text", "text": text}]
        await self.send(
            session, {"type": "user.custom_tool_result", "custom_tool_use_id": calls[-1]["id"], "content": content}
        )

    # ------------------------------------------------------------------------------------------------------------ truth

    async def quiet(self) -> None:
        """Wait until nothing is left to do."""

        async def is_quiet() -> bool:
            return not await self.checker.busy()

        try:
            await until(is_quiet, DEADLINE_S)
        except TimeoutError:
            raise AssertionError(await self.checker.faults()) from None

    async def active_turns(self) -> set[tuple[UUID, int]]:
        """Turns that somebody owns, and which attempt of each it is."""
        rows = await self.pool.fetch("select id, attempt_no from turn where state = 'active'")
        return {(r["id"], r["attempt_no"]) for r in rows}

    async def recovered(self, name: str, killed: set[tuple[UUID, int]], since: float) -> float:
        """Wait until each of these turns goes on under another attempt, or ended; how long that took."""
        return await self.taken_over(name, killed, since, RECOVERY_S_MAX)

    async def taken_over(self, name: str, held: set[tuple[UUID, int]], since: float, most_s: float) -> float:
        """`recovered`, with a bound of its own."""

        async def go_on() -> bool:
            return not held & await self.active_turns()

        await until(go_on, DEADLINE_S)
        took_s = time.monotonic() - since
        if held:
            self.recoveries_s[name] = max(took_s, self.recoveries_s.get(name, 0.0))
            assert took_s < most_s, f"{name}: turns went on only after {took_s:.1f} s"
        return took_s

    async def check(self, *, everything: bool = True) -> None:
        """Nothing is running, nothing is lost, nothing is doubled. Only new sessions, unless `everything`."""
        await self.quiet()
        looked_at = set(self.workspaces) if everything else set(self.workspaces) - self._checked
        self._checked |= looked_at
        effects = read_effects(self.data / "workspaces" / ids.token(s) / "effects" for s in looked_at)
        faults = await self.checker.faults(None if everything else looked_at)
        faults += await self.checker.check_effects(effects, None if everything else looked_at)
        faults += check_requests(self.provider.server.requests[self.first_request :])
        assert not faults, "\n".join(faults)

    def note_recoveries(self) -> None:
        """Add the measured times to the file that a long run collects."""
        target = os.environ.get("PERDURE_LONG_OUT")
        if not target or not self.recoveries_s:
            return
        path = Path(target)
        known: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
        for name, took_s in self.recoveries_s.items():
            known.setdefault(name, []).append(round(took_s, 3))
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def plan(kind: str, name: str) -> Json:
    """The message."""
    return {"type": "user.message", "content": [{"type": "text", "text": f"plan:{kind}:{name}"}]}


def uuid_of(session: str) -> UUID:
    """The id behind what clients write."""
    found = from_wire_id(SESSION, session)
    assert found is not None
    return found


@asynccontextmanager
async def a_world(database_url: str | None, folder: Path, provider: ModelServerThread) -> AsyncGenerator[World]:
    """A world, cleaned up; its recovery times are kept when somebody collects them."""
    world = World(database_url, folder, provider)
    try:
        yield world
        world.note_recoveries()
    finally:
        await world.close()


class Names:
    """Names of plans, never twice in a world."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._count = 0

    def next(self) -> str:
        self._count += 1
        return f"n{self._count}"
