"""One persistent bash: commands go in one after another, each comes back with its output and its exit code.

The exit code travels on a pipe of its own that commands do not hold, with a number used once; so nothing a command
prints, closes or leaves running can be taken for the end of it. Each command is one `eval` with its own
redirections: a syntax error stays inside, its standard input is empty, and closing its output does not close ours.
Output is read all the time, also between commands, so that a background process never blocks on a full pipe; what
it wrote comes with the next command's output.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shlex
import termios
from dataclasses import dataclass
from typing import Final, Literal

import psutil

from perdure.environments.output import Tail, render_output
from perdure.environments.processes import (
    KILL_WAIT_MS_MAX,
    ProcessMark,
    StillAlive,
    kill_marked,
    mark_process,
    settle,
    wait_readable,
)
from perdure.environments.sandbox import OUTPUT_FD, STATUS_FD, Spawned

# bubblewrap needs 25 ms on an idle host; a host too busy to do it in this time will not run a command either.
START_WAIT_MS_MAX: Final = 10_000
READ_BYTES_MAX: Final = 64 * 1024
# A flood (`yes &`) may cost a few percent of the server's core, not all of it: 160 MB/s, then the writer waits.
FLOOD_BYTES_MAX: Final = 8 * 1024 * 1024
FLOOD_WINDOW_MS: Final = 50
# Room for a reason; nothing else is written there.
ERROR_BYTES_MAX: Final = 4 * 1024
STATUS_BYTES_MAX: Final = 1024


class ShellFailed(Exception):
    """The shell could not be started. The message holds what it said."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    output: str
    end: Literal["done", "exited", "timed_out"]
    """`exited`: the shell itself is gone. After all but `done` the shell is dead and its tree killed."""
    exit_code: int | None
    """None when the command was killed because of its time."""


class Shell:
    """A running bash and everything it started. Not for concurrent commands: the owner holds a lock around `run`."""

    def __init__(self, spawned: Spawned) -> None:
        """Take over a started child; `start` does the rest."""
        self._exit_fd = spawned.exit_fd
        self._loop = asyncio.get_running_loop()
        self._spawned = spawned
        self._marks: list[ProcessMark] = []
        self._output = Tail()
        self._errors = Tail(ERROR_BYTES_MAX)
        self._status = bytearray()
        self._expected = b""
        self._code: asyncio.Future[int | None] | None = None
        self._exit_code: int | None = None
        self._exited = asyncio.Event()
        self._closed = False
        self._kill_lock = asyncio.Lock()
        self._window_ends_at = 0.0
        self._window_bytes = 0
        self._resume_timer: asyncio.TimerHandle | None = None
        self._listen()
        self._loop.add_reader(spawned.errors_fd, self._on_errors)
        self._loop.add_reader(spawned.status_fd, self._on_status)
        self._loop.add_reader(self._exit_fd, self._on_exit)

    @property
    def alive(self) -> bool:
        """Whether the next command would find the shell."""
        return self._exit_code is None and not self._closed

    @property
    def marks(self) -> tuple[ProcessMark, ...]:
        """The processes whose end is the end of the whole tree."""
        return tuple(self._marks)

    async def start(self) -> None:
        """Wait until the shell answers. Raises `ShellFailed`; then, and when cancelled, nothing of it runs any more."""
        try:
            # To the end even when cancelled: killing bubblewrap before it has tied its child to its own life would leave
            # that child waiting for ever, and only its mark lets us kill it as well.
            await settle(self._learn_marks())
            ran = await self.run(":", START_WAIT_MS_MAX)
        except BaseException:
            await settle(self.kill())
            raise
        if ran.end != "done":
            raise ShellFailed(self._take_errors() or f"it ended at once ({ran.end}, exit code {ran.exit_code})")

    async def run(self, command: str, timeout_ms: int) -> Ran:
        """Run one command. Cancelling kills the whole tree before it returns."""
        nonce = secrets.token_hex(8)
        self._expected = nonce.encode()
        self._code = self._loop.create_future()
        if not self.alive:
            self._code.set_result(None)
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._send(_frame(command, nonce))
                code = await self._code
        except TimeoutError:
            await settle(self.kill())
            return Ran(self._take_output(), "timed_out", None)
        except BaseException:
            await settle(self.kill())
            raise
        finally:
            self._code = None
        if code is None:
            await settle(self.kill())
            return Ran(self._take_output(), "exited", self._exit_code)
        return Ran(self._take_output(), "done", code)

    async def kill(self) -> None:
        """Kill the shell and its whole tree, wait for their end, give the descriptors back. Repeatable.

        Raises `StillAlive` when something hangs in the kernel; the descriptors are given back all the same.
        """
        async with self._kill_lock:
            if self._closed:
                return
            try:
                await self._kill_tree()
            finally:
                self._release()

    async def _kill_tree(self) -> None:
        if self._spawned.info_fd is None:
            kill_unconfined(self._spawned.process.pid)
        # The init first: when it has ended, so has everything in the sandbox. bubblewrap outside then ends by itself.
        await kill_marked(list(reversed(self._marks)))
        if not self._exited.is_set():
            self._spawned.process.kill()
            await self._wait_exited(KILL_WAIT_MS_MAX)

    def _release(self) -> None:
        self._closed = True
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        spawned = self._spawned
        for descriptor in (spawned.output_fd, spawned.errors_fd, spawned.status_fd, self._exit_fd):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._loop.remove_writer(spawned.commands_fd)
        os.close(spawned.commands_fd)
        if spawned.info_fd is not None:
            os.close(spawned.info_fd)

    async def _learn_marks(self) -> None:
        """Mark our child and the sandbox's init. Until both are known, a kill would have to hope."""
        own = mark_process(self._spawned.process.pid)
        if own is not None:
            self._marks.append(own)
        if self._spawned.info_fd is None:
            return
        told = await self._read_info(self._spawned.info_fd)
        if not told:
            # bubblewrap ended before it made a sandbox. Its reason stands in the pipe when its end is seen.
            await self._wait_exited(START_WAIT_MS_MAX)
            raise ShellFailed(self._take_errors() or "bubblewrap ended without a reason")
        init = mark_process(json.loads(told)["child-pid"])
        if init is not None:
            self._marks.append(init)

    async def _wait_exited(self, wait_ms: int) -> None:
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await self._exited.wait()
        except TimeoutError as error:
            raise StillAlive(f"the shell's process did not end within {wait_ms} ms") from error

    async def _read_info(self, info_fd: int) -> bytes:
        """bubblewrap's JSON, up to the close of the pipe, which follows at once; empty when it ended before."""
        told = b""
        while await wait_readable(info_fd, START_WAIT_MS_MAX):
            chunk = os.read(info_fd, READ_BYTES_MAX)
            if not chunk:
                return told
            told += chunk
        raise ShellFailed(f"bubblewrap made no sandbox within {START_WAIT_MS_MAX} ms")

    async def _send(self, data: bytes) -> None:
        """Write to the shell as fast as it reads. A shell that is gone is noticed by its exit, not here."""
        view = memoryview(data)
        while view and self.alive:
            try:
                view = view[os.write(self._spawned.commands_fd, view) :]
            except BlockingIOError:
                await self._wait_writable()
            except BrokenPipeError:
                return

    async def _wait_writable(self) -> None:
        descriptor = self._spawned.commands_fd
        writable = asyncio.Event()
        self._loop.add_writer(descriptor, writable.set)
        try:
            await writable.wait()
        finally:
            self._loop.remove_writer(descriptor)

    def _listen(self) -> None:
        self._loop.add_reader(self._spawned.output_fd, self._on_output)

    def _on_output(self) -> None:
        now = self._loop.time()
        if now >= self._window_ends_at:
            self._window_ends_at, self._window_bytes = now + FLOOD_WINDOW_MS / 1_000, 0
        self._window_bytes += _read_some(self._loop, self._spawned.output_fd, self._output)
        if self._window_bytes >= FLOOD_BYTES_MAX:
            self._loop.remove_reader(self._spawned.output_fd)
            self._resume_timer = self._loop.call_at(self._window_ends_at, self._listen)

    def _on_errors(self) -> None:
        _read_some(self._loop, self._spawned.errors_fd, self._errors)

    def _on_status(self) -> None:
        try:
            chunk = os.read(self._spawned.status_fd, STATUS_BYTES_MAX)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._spawned.status_fd)
            return
        self._status += chunk
        *lines, rest = bytes(self._status).split(b"\n")
        self._status = bytearray(rest[-STATUS_BYTES_MAX:])
        for line in lines:
            nonce, _, code = line.partition(b" ")
            if nonce == self._expected and code.isdigit():
                # The command wrote its output before the shell wrote this; what is in the pipe now belongs to it.
                _drain(self._spawned.output_fd, self._output)
                self._answer(int(code))

    def _on_exit(self) -> None:
        """Our child ended: by `exit`, by a signal, or because we killed it."""
        if self._exit_code is not None:
            return
        self._loop.remove_reader(self._exit_fd)
        returned = self._spawned.process.wait()
        # bubblewrap tells a signal as 128 + number already; a plain child tells it as a negative one.
        self._exit_code = returned if returned >= 0 else 128 - returned
        _drain(self._spawned.output_fd, self._output)
        _drain(self._spawned.errors_fd, self._errors)
        self._exited.set()
        self._answer(None)

    def _answer(self, code: int | None) -> None:
        if self._code is not None and not self._code.done():
            self._code.set_result(code)

    def _take_output(self) -> str:
        return render_output(*self._output.take())

    def _take_errors(self) -> str:
        return render_output(*self._errors.take()).strip()


def kill_unconfined(pid: int) -> None:
    """Kill a process group and every descendant that can still be found. Without a sandbox no more is possible."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, 9)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            descendant.kill()


def _frame(command: str, nonce: str) -> bytes:
    """The lines that make bash run one command and tell its exit code.

    `builtin`, because a command may have defined functions named eval or printf.
    """
    redirections = f"0</dev/null 1>&{OUTPUT_FD} 2>&1 {STATUS_FD}>&- {OUTPUT_FD}>&-"
    return (
        f'builtin eval {shlex.quote(command)} {redirections}\nbuiltin printf "%s %d\\n" {nonce} "$?" >&{STATUS_FD}\n'
    ).encode()


def _read_some(loop: asyncio.AbstractEventLoop, descriptor: int, into: Tail) -> int:
    """One read, and its size, for each time the loop comes by: a flood of output leaves room for everybody else."""
    try:
        chunk = os.read(descriptor, READ_BYTES_MAX)
    except BlockingIOError:
        return 0
    if chunk:
        into.feed(chunk)
    else:
        loop.remove_reader(descriptor)
    return len(chunk)


def _drain(descriptor: int, into: Tail) -> None:
    """Take what is in the pipe at this moment and no more: a background process may write for ever."""
    count = int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"), "little")
    while count > 0:
        try:
            chunk = os.read(descriptor, min(count, READ_BYTES_MAX))
        except BlockingIOError:
            return
        if not chunk:
            return
        into.feed(chunk)
        count -= len(chunk)
