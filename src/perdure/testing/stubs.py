"""Stand-ins at the border of a running server: tools that count what they execute, and a provider's line that cuts bytes anywhere."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

from perdure.ports.environment import ToolCall, ToolResult
from perdure.testing.signals import Gate, Signal

LABEL_ARGUMENTS: Final = ("command", "file_path", "pattern")
"""The argument that names a call in a script is the first of these that it has."""

HEAD_BYTES_MAX: Final = 64 * 1024


class StubEnvironment:
    """The port `Environment` without a sandbox: each execution is a line in a file, and a script says what a call answers.

    `hold` makes calls with a label wait; a stubborn one does not even end when it is cancelled.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._log.touch()
        self._gates: dict[str, Gate] = {}
        self._stubborn: set[str] = set()
        self._answers: dict[str, ToolResult] = {}
        self._ended: dict[str, Signal] = {}

    def hold(self, label: str, *, stubborn: bool = False) -> Gate:
        """The gate at which calls with this label wait, after they were counted."""
        gate = self._gates[label] = Gate()
        if stubborn:
            self._stubborn.add(label)
        return gate

    def answer(self, label: str, text: str, *, is_error: bool = False) -> None:
        """What calls with this label answer; without it, `done: <label>`."""
        self._answers[label] = ToolResult(content=[{"type": "text", "text": text}], is_error=is_error)

    def executions(self, label: str) -> int:
        """How many calls with this label began."""
        return self._log.read_text().splitlines().count(json.dumps(label))

    def ended(self, label: str) -> Signal:
        """Set when a call with this label ended, in whatever way."""
        return self._ended.setdefault(label, Signal(f"{label} ended"))

    async def run(self, call: ToolCall) -> ToolResult:
        """Count the call, wait at its gate, answer."""
        label = str(next((call.arguments[name] for name in LABEL_ARGUMENTS if name in call.arguments), ""))
        with self._log.open("a") as log:
            log.write(json.dumps(label) + "\n")
        try:
            await self._wait(label)
        finally:
            self.ended(label).set()
        return self._answers.get(label, ToolResult(content=[{"type": "text", "text": f"done: {label}"}]))

    async def _wait(self, label: str) -> None:
        gate = self._gates.get(label)
        if gate is None:
            return
        waiting = asyncio.ensure_future(gate.pass_through())
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                if label not in self._stubborn:
                    waiting.cancel()
                    raise

    async def destroy(self, session: str) -> None:
        """Nothing is kept for a session."""
        del session

    async def problems(self) -> list[str]:
        """None."""
        return []

    def release(self) -> None:
        """Let go of who still waits, and forget the script."""
        for gate in self._gates.values():
            gate.open()
        self._gates.clear()
        self._stubborn.clear()
        self._answers.clear()

    async def close(self) -> None:
        """Let go of who still waits."""
        self.release()


class CuttingLine:
    """A line between a server and a scripted provider. It spells characters out in UTF-8 and sends pieces of a few bytes.

    So characters, pairs of CR and LF, and events arrive cut at any place, as a network may cut them.
    """

    def __init__(self, provider_url: str, *, piece_bytes: int = 3) -> None:
        host, _, port = provider_url.removeprefix("http://").partition(":")
        self._provider = (host, int(port))
        self._piece_bytes = piece_bytes
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.base_url = ""

    async def start(self) -> None:
        """Listen on a free loopback port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Hang up. Repeatable."""
        if self._server is None:
            return
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        above, below = await asyncio.open_connection(*self._provider)
        upward = asyncio.ensure_future(_copy(reader, below))
        try:
            while await self._answer(above, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # either side hung up, which ends the other
        finally:
            upward.cancel()
            below.close()
            writer.close()
            self._serving.discard(task)

    async def _answer(self, above: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one answer on; False when its end is the connection's."""
        head = await above.readuntil(b"\r\n\r\n")
        writer.write(head)
        if b"transfer-encoding: chunked" not in head.lower():
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            writer.write(await above.readexactly(length))
            return True
        while size := int(await above.readline(), 16):
            await self._cut(_respelled(await above.readexactly(size)), writer)
            await above.readexactly(2)
        writer.write(b"0\r\n" + await above.readline())
        await writer.drain()
        return True

    async def _cut(self, payload: bytes, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(payload), self._piece_bytes):
            piece = payload[start : start + self._piece_bytes]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()


def _respelled(payload: bytes) -> bytes:
    """One event, its JSON in plain UTF-8."""
    name, _, data = payload.decode().rstrip("\n").partition("\ndata: ")
    value: Any = json.loads(data)
    return f"{name}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(HEAD_BYTES_MAX):
        writer.write(chunk)
        await writer.drain()
