"""Tools on this host: a folder for each session, a bubblewrap sandbox around its shell.

Below `root`: one folder a session, named by it; `.state` with the shells' markers; `.trash` with folders on their
way out. No other user of the host may enter: a command leaves there what it likes, setuid programs too. What a
crash leaves: folders and markers. The next process kills the shells that markers name before it does anything else
in their sessions.
"""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any, Final

from perdure.environments.files import Searcher, ToolRefused, edit_file, read_file, write_file
from perdure.environments.marker import MarkerFolder, ShellMarker
from perdure.environments.output import NO_OUTPUT, RESULT_CHARACTERS_MAX, clean_text, render_preview
from perdure.environments.processes import StillAlive, in_thread, is_alive, kill_marked, settle
from perdure.environments.sandbox import spawn_sandboxed, spawn_unconfined
from perdure.environments.selftest import find_sandbox
from perdure.environments.shell import Ran, Shell, ShellFailed, kill_unconfined
from perdure.environments.tools import BASH_TIMEOUT_MS_DEFAULT, check_arguments
from perdure.environments.workspace import PathRefused, Workspace
from perdure.ports.environment import EnvironmentUnavailable, Networking, ToolCall, ToolResult

# Long enough for a person to read and answer; a forgotten shell gives its memory back.
SHELL_IDLE_MS_MAX: Final = 600_000
# Each is two processes and some MiB. Above it, the one that was idle longest is closed.
SHELLS_MAX: Final = 64

# Refusals quote what was sent.
REFUSAL_CHARACTERS_MAX: Final = 8_000

SPILL_FOLDER: Final = ".perdure/output"
SHELL_RESTARTED: Final = (
    "[The shell was restarted: working directory, variables and background processes are gone; files are kept]"
)

FOLDER_LOST: Final = "[The working folder of this session was lost: its files are gone, and it starts empty]"

_SESSION: Final = re.compile(r"[a-z0-9_]{1,128}")
_FRESH_NEXT: Final = "working directory, variables and background processes are gone; the next call gets a fresh shell"


class _Slot:
    """What this process holds for one session while it is used or has a shell."""

    def __init__(self) -> None:
        self.shell_lock = asyncio.Lock()
        self.attach_lock = asyncio.Lock()
        self.attached = False
        self.destroyed = False
        self.lost = False
        """The folder of earlier calls was gone when this process met the session, and the model has not been told."""
        self.shell: Shell | None = None
        self.networking: Networking = "none"
        self.calls = 0
        self.used_at = 0.0
        self.idle_timer: asyncio.TimerHandle | None = None


class LocalEnvironment:
    """The port `Environment` on this host."""

    def __init__(self, root: Path, unsafe_no_sandbox: bool = False, *, shell_idle_ms: int = SHELL_IDLE_MS_MAX) -> None:
        """`root` is made when needed and belongs to this environment alone.

        `unsafe_no_sandbox`: where no sandbox holds, run commands without one instead of refusing.
        """
        self._root = root.absolute()
        self._unsafe_no_sandbox = unsafe_no_sandbox
        self._shell_idle_ms = shell_idle_ms
        self._markers = MarkerFolder(self._root / ".state")
        self._searcher = Searcher()
        self._slots: dict[str, _Slot] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self._sandbox: Path | list[str] | None = None
        self._sandbox_lock = asyncio.Lock()
        self._closed = False

    async def run(self, call: ToolCall) -> ToolResult:
        """Run one call; see the port. File tools run beside a command, commands of one session one after another."""
        _check_session(call.session)
        if self._closed:
            raise EnvironmentUnavailable("the environment is closed: the server is shutting down")
        await self._require_sandbox()
        try:
            arguments = check_arguments(call.name, call.arguments)
            async with self._occupied(call.session) as slot:
                result = await self._fit(call, await self._perform(slot, call, arguments))
                if slot.lost:
                    slot.lost = False
                    notice = {"type": "text", "text": FOLDER_LOST}
                    result = ToolResult(content=[notice, *result.content], is_error=result.is_error)
                return result
        except ToolRefused as error:
            # A field's name is the model's own text and may be anything.
            return _text_result(clean_text(str(error))[:REFUSAL_CHARACTERS_MAX], is_error=True)
        except (ShellFailed, StillAlive, OSError) as error:
            raise EnvironmentUnavailable(f"the sandbox of session {call.session!r} failed: {error}") from error

    async def destroy(self, session: str) -> None:
        """Kill what runs in the workspace and remove it. Repeatable."""
        _check_session(session)
        await settle(self._destroy(session))

    async def problems(self) -> list[str]:
        """The self-test's findings, from the first time it was asked; see the port."""
        try:
            found = await self._find_sandbox()
        except EnvironmentUnavailable as error:
            return [str(error)]
        if isinstance(found, Path):
            return []
        if self._unsafe_no_sandbox:
            return [
                "UNSAFE: TOOLS RUN WITHOUT A SANDBOX (unsafe_no_sandbox): every command a model sends can read and"
                " change whatever the server's user can, and use its network",
                *found,
            ]
        return found

    async def close(self) -> None:
        """Kill every shell of this process; the folders stay. Repeatable."""
        self._closed = True
        await settle(self._close())

    # Calls

    async def _perform(self, slot: _Slot, call: ToolCall, arguments: dict[str, Any]) -> ToolResult:
        if call.name == "bash":
            return await self._run_bash(slot, call, arguments)
        try:
            async with asyncio.timeout(call.timeout_ms / 1_000):
                return await self._run_file_tool(call, arguments)
        except TimeoutError as error:
            raise ToolRefused(f"{call.name}: took longer than {call.timeout_ms} ms and was stopped") from error

    async def _run_file_tool(self, call: ToolCall, arguments: dict[str, Any]) -> ToolResult:
        workspace = self._workspace(call.session)
        # An empty `path` is a model's way to leave it out; an empty `file_path` is a mistake.
        path: str = arguments["file_path"] if "file_path" in arguments else arguments.get("path") or "."
        match call.name:
            case "read":
                content = await in_thread(read_file, workspace, path, arguments.get("view_range"))
                return ToolResult(content=content)
            case "write":
                return _text_result(await in_thread(write_file, workspace, path, arguments["content"]))
            case "edit":
                edited = in_thread(
                    lambda: edit_file(
                        workspace,
                        path,
                        old=arguments["old_string"],
                        new=arguments["new_string"],
                        replace_all=arguments.get("replace_all", False),
                    )
                )
                return _text_result(await edited)
            case "glob":
                return _text_result(await self._searcher.glob(workspace, arguments["pattern"], path))
            case _:
                return _text_result(await self._searcher.grep(workspace, arguments["pattern"], path))

    async def _run_bash(self, slot: _Slot, call: ToolCall, arguments: dict[str, Any]) -> ToolResult:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + call.timeout_ms / 1_000
        wanted_ms = arguments.get("timeout_ms") or BASH_TIMEOUT_MS_DEFAULT
        async with _held(slot.shell_lock, deadline, call.timeout_ms):
            if slot.destroyed:
                raise ToolRefused("bash: the session's workspace was removed")
            if arguments.get("restart"):
                await self._restart(slot, call)
                return _text_result("bash session restarted")
            shell, is_news = await self._provide_shell(slot, call)
            timeout_ms = max(1, min(wanted_ms, int((deadline - loop.time()) * 1_000)))
            ran = await shell.run(arguments["command"], timeout_ms)
            if ran.end != "done":
                # The result tells the model, so nobody else has to.
                slot.shell = None
                self._markers.remove_own(call.session, shell.marks)
        return _bash_result(ran, timeout_ms, prefix=f"{SHELL_RESTARTED}\n" if is_news else "")

    async def _restart(self, slot: _Slot, call: ToolCall) -> None:
        if slot.shell is not None:
            await settle(slot.shell.kill())
            slot.shell = None
        await self._kill_marked(call.session)
        self._markers.remove(call.session)
        await self._provide_shell(slot, call)

    async def _provide_shell(self, slot: _Slot, call: ToolCall) -> tuple[Shell, bool]:
        """The session's shell, fresh if need be; and whether the model must hear that an earlier one is gone."""
        marker = self._markers.read(call.session)
        is_news = marker is not None
        if slot.shell is not None:
            # A worker beside us may have had the session meanwhile: what it ran, ours has not seen.
            is_latest = marker is not None and marker.processes == slot.shell.marks
            if is_latest and slot.shell.alive and slot.networking == call.networking:
                return slot.shell, False
            is_news = is_news or slot.shell.alive
            await settle(slot.shell.kill())
            slot.shell = None
            if not is_latest:
                await self._kill_marked(call.session)
        await self._make_room()
        folder = self._folder(call.session)
        sandbox = await self._find_sandbox()
        confined = isinstance(sandbox, Path)
        spawned = spawn_sandboxed(sandbox, folder, call.networking) if confined else spawn_unconfined(folder)
        shell = Shell(spawned)
        await shell.start()
        if self._closed or slot.destroyed:
            # Whoever closed or removed could not see this shell yet.
            await settle(shell.kill())
            raise ShellFailed("it was closed while its shell started")
        try:
            # Before the first command: from then on there is something to find and to tell.
            self._markers.write(call.session, ShellMarker(processes=shell.marks, confined=confined))
        except BaseException:
            await settle(shell.kill())
            raise
        slot.shell, slot.networking = shell, call.networking
        return shell, is_news

    async def _make_room(self) -> None:
        """Close the shell that was idle longest when there are too many. Busy ones are never closed."""
        with_shell = [slot for slot in self._slots.values() if slot.shell is not None]
        idle = [(session, slot) for session, slot in self._slots.items() if slot.shell is not None and not slot.calls]
        if len(with_shell) >= SHELLS_MAX and idle:
            await self._close_idle(*min(idle, key=lambda entry: entry[1].used_at))

    async def _fit(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Clean the text and move what is too long for the model into a file of the workspace."""
        content: list[dict[str, Any]] = []
        for block in result.content:
            if block["type"] == "text":
                block = {**block, "text": await self._fit_text(call, clean_text(block["text"]))}
            content.append(block)
        return ToolResult(content=content, is_error=result.is_error)

    async def _fit_text(self, call: ToolCall, text: str) -> str:
        if len(text) <= RESULT_CHARACTERS_MAX:
            return text or NO_OUTPUT
        if call.name == "read":
            # The file is there already; a copy of a part of it would only grow the workspace.
            return render_preview(text, call.arguments["file_path"], "Read a smaller part with view_range.")
        data = text.encode()
        workspace = self._workspace(call.session)
        try:
            path = await in_thread(workspace.create_numbered, SPILL_FOLDER, ".txt", data)
        except (OSError, PathRefused) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return render_preview(text, "no file", f"It could not be written ({reason}).")
        return render_preview(text, path, "Read it with view_range or search it with grep.")

    # Sessions

    @contextlib.asynccontextmanager
    async def _occupied(self, session: str) -> AsyncGenerator[_Slot, None]:
        """The session's slot, with its folder made and the shells of earlier processes killed."""
        slot = self._slots.setdefault(session, _Slot())
        slot.calls += 1
        if slot.idle_timer is not None:
            slot.idle_timer.cancel()
            slot.idle_timer = None
        try:
            async with slot.attach_lock:
                if not slot.attached:
                    await self._attach(session)
                    slot.attached = True
            yield slot
        finally:
            slot.calls -= 1
            self._leave(session, slot)

    def _leave(self, session: str, slot: _Slot) -> None:
        """After the last call: forget the session, or let its shell wait for the next one."""
        if slot.calls or self._slots.get(session) is not slot:
            return
        if slot.shell is None or not slot.shell.alive:
            self._forget(session, slot)
            return
        loop = asyncio.get_running_loop()
        slot.used_at = loop.time()
        slot.idle_timer = loop.call_later(self._shell_idle_ms / 1_000, self._start_closing, session, slot)

    def _forget(self, session: str, slot: _Slot) -> None:
        del self._slots[session]
        if slot.shell is not None:
            # Dead, but its pipes are still open.
            self._own(slot.shell.kill())
            slot.shell = None

    def _start_closing(self, session: str, slot: _Slot) -> None:
        self._own(self._close_idle(session, slot))

    def _own(self, closing: Coroutine[Any, Any, None]) -> None:
        """Keep a closing until it is done; `close` awaits it."""
        work: asyncio.Task[None] = asyncio.get_running_loop().create_task(closing)
        self._closings.add(work)
        work.add_done_callback(self._closings.discard)

    async def _close_idle(self, session: str, slot: _Slot) -> None:
        """Close a shell that nobody uses. Its marker stays: the model has not been told."""
        async with slot.shell_lock:
            if slot.calls or slot.shell is None:
                return
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
            shell, slot.shell = slot.shell, None
            await settle(shell.kill())
            if not slot.calls and self._slots.get(session) is slot:
                del self._slots[session]

    async def _attach(self, session: str) -> None:
        """First contact of this process with a session. A folder that was there before and is gone is never replaced silently."""
        self._make_own_folders()
        folder = self._folder(session)
        made = self._markers.made_before(session)
        self._slots[session].lost = made and not folder.exists()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not made:
            self._markers.note_made(session)
        await self._kill_marked(session)

    async def _kill_marked(self, session: str) -> None:
        """Kill what an earlier process left running. bubblewrap should have; this makes sure."""
        marker = self._markers.read(session)
        if marker is None:
            return
        if not marker.confined:
            for process in marker.processes:
                if is_alive(process):
                    kill_unconfined(process.pid)
        await settle(kill_marked(list(reversed(marker.processes))))

    async def _destroy(self, session: str) -> None:
        slot = self._slots.pop(session, None)
        if slot is not None:
            slot.destroyed = True
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
            if slot.shell is not None:
                await slot.shell.kill()
        await self._kill_marked(session)
        self._markers.remove(session)
        self._markers.forget_made(session)
        trash = self._root / ".trash"
        with contextlib.suppress(FileNotFoundError):
            folder = self._folder(session)
            os.stat(folder)
            trash.mkdir(mode=0o700, exist_ok=True)
            # Out of the way at once; the removal may take long, and after a crash the next try finds it by its name.
            os.rename(folder, trash / f"{session}-{secrets.token_hex(8)}")
        for leftover in list(trash.glob(f"{session}-*")):
            await _remove_tree(leftover)

    async def _close(self) -> None:
        slots = list(self._slots.values())
        self._slots.clear()
        async with asyncio.TaskGroup() as group:
            for slot in slots:
                if slot.idle_timer is not None:
                    slot.idle_timer.cancel()
                if slot.shell is not None:
                    group.create_task(slot.shell.kill())
        if self._closings:
            await asyncio.wait(self._closings)

    def _folder(self, session: str) -> Path:
        return self._root / session

    def _workspace(self, session: str) -> Workspace:
        return Workspace(self._folder(session))

    # The sandbox

    async def _require_sandbox(self) -> None:
        found = await self._find_sandbox()
        if not isinstance(found, Path) and not self._unsafe_no_sandbox:
            raise EnvironmentUnavailable(
                f"tools can't run on this host: {'; '.join(found)}. Mend this, or set unsafe_no_sandbox to run tools"
                " without a sandbox"
            )

    async def _find_sandbox(self) -> Path | list[str]:
        """Once found out it is kept. What keeps us from trying passes, a full disk say: `EnvironmentUnavailable`, also where the
        operator allows no sandbox, since one may hold."""
        async with self._sandbox_lock:
            if self._sandbox is None:
                try:
                    self._make_own_folders()
                    self._sandbox = await find_sandbox(self._root / ".state")
                except OSError as error:
                    raise EnvironmentUnavailable(f"tools can't run now: {error}") from error
            return self._sandbox

    def _make_own_folders(self) -> None:
        for folder in (self._root, self._root / ".state"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_mode & 0o077 and status.st_uid == os.geteuid():
                folder.chmod(0o700)
            elif status.st_mode & 0o007 and status.st_uid != os.geteuid():
                raise PermissionError(
                    f"{str(folder)!r} lets every user of the host in and belongs to another one: give it to the server's user"
                    " (chown), or close it to others (chmod o=)"
                )


def _check_session(session: str) -> None:
    """The name becomes a folder's; a slash or a leading dot in it would lead elsewhere."""
    if _SESSION.fullmatch(session) is None:
        raise ValueError(f"session {session!r}: must be 1 to 128 lower-case letters, digits and underscores")


@contextlib.asynccontextmanager
async def _held(lock: asyncio.Lock, deadline: float, timeout_ms: int) -> AsyncGenerator[None, None]:
    """Hold the session's shell. The wait for it counts against the call's time."""
    try:
        async with asyncio.timeout_at(deadline):
            await lock.acquire()
    except TimeoutError as error:
        raise ToolRefused(
            f"bash: an earlier command of this session was still running after {timeout_ms} ms; this one was not"
            " started"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _text_result(text: str, *, is_error: bool = False) -> ToolResult:
    return ToolResult(content=[{"type": "text", "text": text}], is_error=is_error)


def _bash_result(ran: Ran, timeout_ms: int, *, prefix: str) -> ToolResult:
    match ran.end:
        case "done" if ran.exit_code == 0:
            return _text_result(f"{prefix}{ran.output or NO_OUTPUT}")
        case "done":
            note = f"[exit code {ran.exit_code}]"
        case "exited":
            note = f"[the shell ended with exit code {ran.exit_code}: {_FRESH_NEXT}]"
        case "timed_out":
            note = f"[timed out after {timeout_ms} ms; the command and its shell were killed: {_FRESH_NEXT}]"
    separator = "\n" if ran.output else ""
    return _text_result(f"{prefix}{ran.output}{separator}{note}", is_error=ran.end == "timed_out" or ran.exit_code != 0)


async def _remove_tree(folder: Path) -> None:
    """Remove a tree that a tool may have made as deep and as locked as it liked; recursion here could not."""
    if await _run_quietly("rm", "-rf", "--", str(folder)) == 0:
        return
    await _run_quietly("chmod", "-R", "u+rwX", "--", str(folder))
    if await _run_quietly("rm", "-rf", "--", str(folder)) != 0:
        raise OSError(f"the workspace {str(folder)!r} could not be removed; remove it by hand")


async def _run_quietly(*command: str) -> int:
    devnull = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=devnull, stdout=devnull, stderr=devnull)
    return await process.wait()
