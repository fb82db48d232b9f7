"""Processes named so that a reused pid is never mistaken for an old one, and the killing of them.

A mark is a pid, its start time from /proc and the host it counts on. Killing goes through a pidfd: once the
descriptor is open and the start time agrees, the signal can't reach anybody else. Waiting for the init of a pid
namespace waits for its whole tree, because the kernel lets such an init end only after it has ended and reaped
every other process of the namespace.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

# SIGKILL takes effect within milliseconds; one stuck in the kernel (dead disk, dead mount) may take for ever.
KILL_WAIT_MS_MAX: Final = 5_000
# Field 22 of /proc/PID/stat; counted from the state, which is field 3 and the first one after the name.
_START_FIELD_AFTER_NAME: Final = 19


class ProcessMark(msgspec.Struct, frozen=True):
    """One process, for good: no later process has the same three values."""

    pid: int
    start_ticks: int
    host: str
    """Boot and pid namespace: the pid means nothing after a reboot or in another container."""


class StillAlive(Exception):
    """A killed process did not end within `KILL_WAIT_MS_MAX`."""


def read_host() -> str:
    """Name the boot and the pid namespace in which this process counts pids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def mark_process(pid: int) -> ProcessMark | None:
    """Mark a live process; None when there is none."""
    start_ticks = _read_start_ticks(pid)
    return None if start_ticks is None else ProcessMark(pid=pid, start_ticks=start_ticks, host=read_host())


def is_alive(mark: ProcessMark) -> bool:
    """Whether exactly this process still runs. One that has ended but waits to be reaped does not."""
    return mark.host == read_host() and _read_start_ticks(mark.pid) == mark.start_ticks


def open_marked(mark: ProcessMark) -> int | None:
    """A pidfd for exactly this process, owned by the caller; None when it is gone."""
    if mark.host != read_host():
        return None
    try:
        descriptor = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        return None
    # Checked after opening: from here on the descriptor can't change its meaning.
    if _read_start_ticks(mark.pid) == mark.start_ticks:
        return descriptor
    os.close(descriptor)
    return None


def send_kill(descriptor: int) -> None:
    """SIGKILL through a pidfd; nothing happens when the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


async def kill_marked(marks: Sequence[ProcessMark]) -> None:
    """Kill these processes and return when all have ended. Raises `StillAlive` after `KILL_WAIT_MS_MAX`."""
    for mark in marks:
        descriptor = open_marked(mark)
        if descriptor is None:
            continue
        try:
            send_kill(descriptor)
            await wait_exit(descriptor)
        finally:
            os.close(descriptor)


async def wait_exit(descriptor: int, wait_ms: int = KILL_WAIT_MS_MAX) -> None:
    """Wait until the process behind a pidfd has ended. Raises `StillAlive`."""
    if not await wait_readable(descriptor, wait_ms):
        raise StillAlive(f"a killed process did not end within {wait_ms} ms; it hangs in the kernel")


async def wait_readable(descriptor: int, wait_ms: int) -> bool:
    """Wait until a descriptor can be read or its peer is gone; False when that took longer than `wait_ms`."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _settle, readable)
    try:
        async with asyncio.timeout(wait_ms / 1_000):
            await readable
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


async def settle(work: Awaitable[T]) -> T:
    """Await to the end, whatever happens: a cancellation is raised again, but only when the work is done.

    For work that must not be left half done or running behind the caller's back: killing, writing.
    """
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # seen; the cancellation is the louder news
    raise cancelled


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run blocking file work in a thread. Cancelling waits for it: nothing is written after the caller has gone on."""
    return await settle(asyncio.to_thread(function, *arguments))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _read_start_ticks(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in {b"Z", b"X"} else int(fields[_START_FIELD_AFTER_NAME])
