"""The own loop's performer: makes the one call of a step, and says what came of it.

It reads outside transactions, writes nothing, and knows no policy. Whoever cancels it decides what that means: with `stop` set it
returns what had been completed; when its task is cancelled it leaves nothing running.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain import ids
from perdure.domain.agent import judge_call, offered_tools
from perdure.domain.event import encode
from perdure.domain.item import call_id
from perdure.domain.step import Step
from perdure.domain.transcript import build_messages, tool_result
from perdure.harnesses.reply import Place, assemble
from perdure.ports.bus import Preview, PreviewDelta, PreviewStarted
from perdure.ports.environment import Environment, EnvironmentUnavailable, ToolCall, ToolResult
from perdure.ports.ledger import Ledger, ModelErred, ModelReplied, StepInput, StepOutcome, Stopped, ToolReturned
from perdure.ports.model import (
    BlockClosed,
    BlockDelta,
    BlockOpened,
    Ended,
    ModelBlock,
    ModelEvent,
    ModelFailed,
    ModelRequest,
    ModelRouter,
    ModelUnknown,
    Progress,
    Usage,
)

STALL_MS: Final = 120_000
"""A provider that sends nothing for this long has lost the call."""

OUTPUT_TOKENS_MAX: Final = 16_000
TOOL_MS: Final = 120_000
SHELL_MS: Final = 600_000
"""A tool may take two minutes; a shell command may ask for up to ten."""

ERROR_CODES: Final[Mapping[str, str]] = {
    "overloaded": "model_overloaded_error",
    "rate_limited": "model_rate_limited_error",
    "billing": "billing_error",
}
_OTHER_ERROR: Final = "model_request_failed_error"


class LoopPerformer:
    """Performs model and tool steps."""

    def __init__(
        self,
        ledger: Ledger,
        models: ModelRouter,
        environment: Environment,
        *,
        tool_definitions: Mapping[str, dict[str, Any]],
        preview: Callable[[Preview], None],
        stall_ms: int = STALL_MS,
    ) -> None:
        self._ledger = ledger
        self._models = models
        self._environment = environment
        self._definitions = tool_definitions
        self._preview = preview
        self._stall_ms = stall_ms

    async def perform(self, step: Step, stop: asyncio.Event) -> StepOutcome:
        """Make the call. With `stop` set it is cancelled and what was completed comes back as `Stopped`."""
        found = await self._ledger.read_step(step)
        if found is None:
            # The session was deleted: there is nothing to perform, and whoever records this finds no turn.
            return Stopped(step_id=step.id)
        if step.kind == "model":
            return await self._model(step, found, stop)
        return await self._tool(step, found, stop)

    # ----------------------------------------------------------------------------------------------------------- model

    async def _model(self, step: Step, found: StepInput, stop: asyncio.Event) -> StepOutcome:
        agent: dict[str, Any] = msgspec.json.decode(found.config.agent)
        place = Place(step.turn_id, step.ordinal, step.try_no)
        reading = _Reading()

        def judge(name: str, arguments: dict[str, Any]) -> Any:
            return judge_call(agent, name, arguments)

        try:
            model, name = self._models.resolve(str(agent["model"]["id"]))
        except ModelUnknown as unknown:
            return ModelErred(step_id=step.id, code=_OTHER_ERROR, message=str(unknown), retryable=False)
        request = await self._request(step, agent, name)
        stream: AsyncGenerator[ModelEvent, None] = model.stream(request)  # pyright: ignore[reportAssignmentType]
        consume = asyncio.ensure_future(self._consume(step, place, stream, reading))
        try:
            ended = await _unless(consume, stop)
        except ModelFailed as failed:
            return _erred(step, failed)
        finally:
            consume.cancel()
            await asyncio.gather(consume, return_exceptions=True)
            await stream.aclose()
        if ended is None:
            reply = assemble(place, reading.blocks, judge, stop_reason=None)
            return Stopped(
                step_id=step.id,
                blocks=reply.blocks,
                calls=reply.calls,
                transcript=reply.transcript,
                usage=reading.usage,
            )
        reply = assemble(place, reading.blocks, judge, stop_reason=ended.stop_reason)
        return ModelReplied(
            step_id=step.id,
            blocks=reply.blocks,
            calls=reply.calls,
            transcript=reply.transcript,
            stop_reason=ended.stop_reason,
            stop_details=None if ended.stop_details is None else encode(ended.stop_details),
            usage=ended.usage,
        )

    async def _request(self, step: Step, agent: dict[str, Any], name: str) -> ModelRequest:
        history = await self._ledger.read_transcript(step.session_id, step.thread_id)
        tools = [self._definition(t.name, t.definition) for t in offered_tools(agent)]
        return ModelRequest(
            model=name,
            system=agent.get("system"),
            messages=build_messages(history),
            tools=tools,
            max_tokens=OUTPUT_TOKENS_MAX,
            effort=_effort(agent),
            speed=agent["model"].get("speed"),
        )

    def _definition(self, name: str, own: dict[str, Any] | None) -> dict[str, Any]:
        return own if own is not None else self._definitions[name]

    async def _consume(
        self, step: Step, place: Place, stream: AsyncGenerator[ModelEvent, None], reading: "_Reading"
    ) -> Ended:
        """Read the reply to its end; completed blocks and what was used are kept in `reading` as they come."""
        offsets: dict[int, int] = {}
        while True:
            try:
                async with asyncio.timeout(self._stall_ms / 1000):
                    event = await anext(stream)
            except TimeoutError:
                message = f"The model sent nothing for {self._stall_ms / 1000:g} s."
                raise ModelFailed("stalled", message, retryable=True, usage=reading.usage) from None
            except StopAsyncIteration:
                message = "The reply ended before it was complete."
                raise ModelFailed("request_failed", message, retryable=True, usage=reading.usage) from None
            match event:
                case BlockOpened(index, kind) if kind in ("text", "thinking"):
                    self._show_start(step, place.item(index), is_text=kind == "text")
                    offsets[index] = 0
                case BlockDelta(index, text) if index in offsets and text:
                    self._show_delta(step, place.item(index), offsets[index], text)
                    offsets[index] += len(text)
                case BlockClosed(index, block):
                    reading.blocks.append((index, block))
                case Progress(usage) if usage is not None:
                    reading.usage = usage
                case Ended():
                    return event
                case _:
                    pass

    def _show_start(self, step: Step, item: UUID, *, is_text: bool) -> None:
        kind = "message" if is_text else "thinking"
        self._preview(PreviewStarted(session_id=step.session_id, thread_id=step.thread_id, item_id=item, kind=kind))

    def _show_delta(self, step: Step, item: UUID, offset: int, text: str) -> None:
        self._preview(
            PreviewDelta(session_id=step.session_id, thread_id=step.thread_id, item_id=item, offset=offset, text=text)
        )

    # ------------------------------------------------------------------------------------------------------------ tool

    async def _tool(self, step: Step, found: StepInput, stop: asyncio.Event) -> StepOutcome:
        assert found.call is not None and step.item_id is not None
        body: dict[str, Any] = msgspec.json.decode(found.call.body or b"{}")
        environment: dict[str, Any] = msgspec.json.decode(found.config.environment)
        call = ToolCall(
            session=ids.token(step.session_id),
            name=step.name,
            arguments=body["input"],
            networking="unrestricted" if _networked(environment) else "none",
            timeout_ms=SHELL_MS if step.name == "bash" else TOOL_MS,
        )
        run = asyncio.ensure_future(self._environment.run(call))
        try:
            result = await _unless(run, stop)
        except EnvironmentUnavailable as unavailable:
            result = ToolResult(content=[{"type": "text", "text": str(unavailable)}], is_error=True)
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        if result is None:
            return Stopped(step_id=step.id)
        return ToolReturned(
            step_id=step.id,
            body=encode({"content": result.content, "is_error": result.is_error}),
            transcript=tool_result(call_id(step.item_id), result.content, is_error=result.is_error),
            is_error=result.is_error,
        )


class _Reading:
    """How far a reply has come: what an interrupt or a stall leaves of it."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, ModelBlock]] = []
        self.usage: Usage | None = None


async def _unless(work: "asyncio.Future[Any]", stop: asyncio.Event) -> Any:
    """The result of `work`, or None when `stop` came first."""
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        waiting.cancel()


def _erred(step: Step, failed: ModelFailed) -> ModelErred:
    return ModelErred(
        step_id=step.id,
        code=ERROR_CODES.get(failed.code, _OTHER_ERROR),
        message=failed.message,
        retryable=failed.retryable,
        retry_after_ms=failed.retry_after_ms,
        usage=failed.usage,
    )


def _effort(agent: dict[str, Any]) -> str | None:
    effort: Any = agent["model"].get("effort")
    if isinstance(effort, dict):
        level: Any = effort.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return str(level)  # pyright: ignore[reportUnknownArgumentType]
    return effort


def _networked(environment: dict[str, Any]) -> bool:
    """Whether tools may use the network: what the session's environment says; without one they may not."""
    networking: dict[str, Any] = environment.get("networking") or {}
    return networking.get("type") == "unrestricted"
