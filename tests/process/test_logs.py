"""What logs hold: ids and reasons, and nothing of what people say, what models answer, or what keys are."""

from tests.process.world import World, plan

from perdure import telemetry
from perdure.testing.model_server import Failure, RecordedRequest, Reply
from perdure.testing.processes import Answer, until

MARKER = "Xylophon7"


def test_a_bug_is_blamed_on_its_place_and_quotes_nothing() -> None:
    try:
        raise KeyError(MARKER)
    except KeyError as error:
        fields = telemetry.blame(error)
    assert fields["error"] == "KeyError" and "test_logs.py" in fields["at"][-1]
    assert MARKER not in str(fields)


async def test_nothing_of_a_conversation_is_logged_at_any_level(world: World) -> None:
    server = await world.serve(log_level="debug", log_json="true")
    session = await world.session()

    async def call(method: str, path: str, body: object = None) -> Answer:
        return await server.api.call(method, path, body)  # type: ignore[arg-type]

    for kind in ("talk", "tool"):
        await world.say(session, kind, MARKER)
        assert await world.at_rest(session) == "end_turn"
    await call("POST", f"/v1/sessions/{session}/events", {"events": [{"type": MARKER}]})
    await call("POST", "/v1/agents", {"name": MARKER, "model": MARKER, MARKER: 1})
    await call("GET", f"/v1/{MARKER}?{MARKER}={MARKER}")
    script = world.script

    def refuse(request: RecordedRequest) -> Reply | Failure:
        script(request)
        return Failure(400, "invalid_request_error", f"{MARKER} is not welcome.")

    world.provider.server.respond_with(refuse)
    await world.send(session, plan("talk", MARKER))

    async def is_refused() -> bool:
        return (await call("GET", f"/v1/sessions/{session}")).ok()["status"] == "terminated"

    await until(is_refused, 20)
    assert await server.terminate() == 0
    said = server.errors()
    assert "draining" in said, "it said something"
    assert MARKER not in said
    assert "pk_" not in said
