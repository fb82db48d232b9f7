"""What a later process must know of a session's shell. Kept beside the workspaces, where no sandbox reaches.

A marker stands while a shell runs, and after its end as long as the model has not been told of it. So whoever
starts a shell and finds a marker kills what it names and tells the model that the old shell is gone.
"""

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from perdure.environments.processes import ProcessMark


class ShellMarker(msgspec.Struct, frozen=True, kw_only=True):
    """The last shell of a session."""

    processes: tuple[ProcessMark, ...] = ()
    confined: bool = True
    """Whether it ran in a sandbox, so that the end of `processes` is the end of its whole tree."""


class MarkerFolder:
    """Markers by session. Each is a file that is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        """`folder` is there when the first marker is written."""
        self._folder = folder

    def read(self, session: str) -> ShellMarker | None:
        """The marker; None when no shell is owed an explanation."""
        try:
            return msgspec.json.decode(self._path(session).read_bytes(), type=ShellMarker)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            # Torn by a crash of the host: its processes are gone, and the model is still to be told.
            return ShellMarker()

    def write(self, session: str, marker: ShellMarker) -> None:
        """Put a marker in place. It outlives this process; after a crash of the host there is no shell to find."""
        draft = self._folder / f".{secrets.token_hex(8)}.tmp"
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(marker))
            os.replace(draft, self._path(session))
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def remove_own(self, session: str, processes: tuple[ProcessMark, ...]) -> None:
        """The model knows of the end of this shell. The marker of a later one, of another worker, stays."""
        marker = self.read(session)
        if marker is not None and marker.processes == processes:
            self.remove(session)

    def remove(self, session: str) -> None:
        """The model knows, or the session is gone. Repeatable."""
        with contextlib.suppress(FileNotFoundError):
            self._path(session).unlink()

    def made_before(self, session: str) -> bool:
        """Whether this session's folder was made here at some time."""
        return self._made(session).exists()

    def note_made(self, session: str) -> None:
        """The folder is there from now on."""
        self._made(session).touch(mode=0o600)

    def forget_made(self, session: str) -> None:
        """The folder was removed on purpose. Repeatable."""
        self._made(session).unlink(missing_ok=True)

    def _made(self, session: str) -> Path:
        return self._folder / f"{session}.made"

    def _path(self, session: str) -> Path:
        return self._folder / f"{session}.json"
