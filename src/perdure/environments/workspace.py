"""The server's own access to a workspace folder, which a tool inside may have filled with traps.

Paths are walked one component at a time from a descriptor of the folder, and symbolic links are read and followed
by hand, as the sandbox would see them: `/workspace` is the folder, and a link that leads anywhere else is refused.
The kernel never follows a link for us, so a link planted between a check and its use ends in an error, not outside.
This was chosen over running the file tools inside the sandbox because it costs no process for each call, works
beside a busy shell, and needs no interpreter inside.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perdure.environments.sandbox import WORKSPACE

# The kernel's own bound.
LINKS_FOLLOWED_MAX: Final = 40
# Links that go up and down multiply: forty of them could lead through millions of folders. This many take a tenth of a second.
FOLDERS_ENTERED_MAX: Final = 20_000
PATH_CHARACTERS_MAX: Final = 4_096

_FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for its other end.
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# By names of their own, so that a test can plant a link behind one and count the other.
look: Final = os.lstat
enter: Final = os.open


class PathRefused(Exception):
    """The path is not one in the workspace. The message says why."""


class NotRegular(Exception):
    """There is something at the path, but no regular file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads: a name in an open folder. `facts` is None when nothing is there yet."""

    folder_fd: int
    name: str
    """`.` for the workspace folder itself."""
    path: str
    """As the sandbox names it, links resolved."""
    facts: os.stat_result | None


class Workspace:
    """Files below one folder. Every method blocks; call them in a thread."""

    def __init__(self, folder: Path) -> None:
        """Keep the folder's path, which nobody but the server can change."""
        self._folder = folder

    @contextlib.contextmanager
    def locate(self, path: str, *, make_parents: bool = False) -> Generator[Place, None, None]:
        """Walk to `path`. Raises `PathRefused` or `OSError`."""
        walk = _Walk(self._folder, split_path(path), make_parents=make_parents)
        try:
            yield walk.arrive()
        finally:
            walk.close()

    @contextlib.contextmanager
    def open_folder(self, path: str) -> Generator[tuple[int, str, str | None], None, None]:
        """A readable descriptor of a folder, its path, None; for a file: its folder, the folder's path, its name."""
        with self.locate(path) as place:
            if place.facts is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if stat.S_ISDIR(place.facts.st_mode):
                name, shown, only = place.name, place.path, None
            elif stat.S_ISREG(place.facts.st_mode):
                name, shown, only = ".", place.path.rpartition("/")[0], place.name
            else:
                raise NotRegular
            descriptor = os.open(name, _READ_FLAGS | os.O_DIRECTORY, dir_fd=place.folder_fd)
            try:
                yield descriptor, shown, only
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def open_file(self, path: str) -> Generator[tuple[int, os.stat_result], None, None]:
        """A readable descriptor of a regular file and its facts. Raises `NotRegular` for anything else."""
        with self.locate(path) as place:
            if place.facts is not None and not stat.S_ISREG(place.facts.st_mode):
                raise NotRegular
            descriptor = os.open(place.name, _READ_FLAGS, dir_fd=place.folder_fd)
            try:
                facts = os.fstat(descriptor)
                # Again, on what was opened: the name may have got another meaning in between.
                if not stat.S_ISREG(facts.st_mode):
                    raise NotRegular
                yield descriptor, facts
            finally:
                os.close(descriptor)

    def write_file(self, path: str, data: bytes) -> None:
        """Put a whole file in place, parents included, mode kept. Readers see old or new content, never a part."""
        with self.locate(path, make_parents=True) as place:
            if place.facts is not None and not stat.S_ISREG(place.facts.st_mode):
                raise NotRegular
            draft = f".perdure-{secrets.token_hex(8)}.tmp"
            try:
                self._create(place.folder_fd, draft, data, place.facts)
                os.rename(draft, place.name, src_dir_fd=place.folder_fd, dst_dir_fd=place.folder_fd)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=place.folder_fd)
                raise

    def create_numbered(self, folder: str, suffix: str, data: bytes) -> str:
        """Write `data` to a new file named by the next free number, and return its path."""
        with self.locate(f"{folder}/0{suffix}", make_parents=True) as place:
            number = 1 + max(_numbers_in(place.folder_fd, suffix), default=0)
            while True:
                name = f"{number}{suffix}"
                try:
                    self._create(place.folder_fd, name, data, None)
                except FileExistsError:
                    number += 1
                    continue
                return f"{place.path.rpartition('/')[0]}/{name}"

    @staticmethod
    def _create(folder_fd: int, name: str, data: bytes, like: os.stat_result | None) -> None:
        descriptor = os.open(name, _CREATE_FLAGS, 0o644, dir_fd=folder_fd)
        with open(descriptor, "wb") as file:
            if like is not None:
                os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
            file.write(data)


class _Walk:
    """One walk from the workspace folder to a path. Holds one descriptor at a time."""

    def __init__(self, folder: Path, components: list[str], *, make_parents: bool) -> None:
        self._root_fd = os.open(folder, _FOLDER_FLAGS)
        self._here_fd = os.dup(self._root_fd)
        self._names: list[str] = []
        self._pending = deque(components)
        self._links_followed = 0
        self._folders_entered = 0
        self._make_parents = make_parents

    def close(self) -> None:
        os.close(self._here_fd)
        os.close(self._root_fd)

    def arrive(self) -> Place:
        while self._pending:
            name = self._pending.popleft()
            if name == "..":
                self._go_up()
                continue
            facts = self._look(name)
            if facts is not None and stat.S_ISLNK(facts.st_mode):
                self._follow(name)
            elif not self._pending:
                return Place(self._here_fd, name, "/".join([WORKSPACE, *self._names, name]), facts)
            else:
                self._enter(name, missing=facts is None)
        return self._arrive_at_folder()

    def _arrive_at_folder(self) -> Place:
        """The path ended in `..`, in a link to a folder, or was the workspace itself."""
        path = "/".join([WORKSPACE, *self._names])
        return Place(self._here_fd, ".", path, os.stat(self._here_fd))

    def _look(self, name: str) -> os.stat_result | None:
        try:
            return look(name, dir_fd=self._here_fd)
        except FileNotFoundError:
            return None

    def _enter(self, name: str, *, missing: bool) -> None:
        self._folders_entered += 1
        if self._folders_entered > FOLDERS_ENTERED_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if missing and self._make_parents:
            os.mkdir(name, 0o755, dir_fd=self._here_fd)
        entered = enter(name, _FOLDER_FLAGS, dir_fd=self._here_fd)
        os.close(self._here_fd)
        self._here_fd = entered
        self._names.append(name)

    def _go_up(self) -> None:
        """Back along the names that were walked; the kernel's `..` leads elsewhere when a folder has been moved."""
        if not self._names:
            raise PathRefused(f"leads out of {WORKSPACE}")
        self._return_to(self._names[:-1])

    def _follow(self, name: str) -> None:
        self._links_followed += 1
        if self._links_followed > LINKS_FOLLOWED_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(name, dir_fd=self._here_fd)
        if target.startswith("/"):
            self._return_to([])
            if not _is_inside(target):
                raise PathRefused(f"goes through a symbolic link that leads out of {WORKSPACE}")
        self._pending.extendleft(reversed(split_path(target)))

    def _return_to(self, names: list[str]) -> None:
        os.close(self._here_fd)
        self._here_fd = os.dup(self._root_fd)
        self._names = []
        for name in names:
            self._enter(name, missing=False)


def split_path(path: str) -> list[str]:
    """The components below the workspace folder, `..` included. Raises `PathRefused` for another absolute path."""
    if not path:
        raise PathRefused("must not be empty")
    if len(path) > PATH_CHARACTERS_MAX:
        raise PathRefused(f"is longer than {PATH_CHARACTERS_MAX} characters")
    if path.startswith("/"):
        if not _is_inside(path):
            raise PathRefused(f"is outside {WORKSPACE}; give a relative path or one below {WORKSPACE}")
        path = path[len(WORKSPACE) :]
    return [name for name in path.split("/") if name not in {"", "."}]


def _is_inside(absolute: str) -> bool:
    return absolute == WORKSPACE or absolute.startswith(f"{WORKSPACE}/")


def _numbers_in(folder_fd: int, suffix: str) -> list[int]:
    listing_fd = os.open(".", _READ_FLAGS | os.O_DIRECTORY, dir_fd=folder_fd)
    try:
        stems = (name.removesuffix(suffix) for name in os.listdir(listing_fd))
        return [int(stem) for stem in stems if stem.isascii() and stem.isdigit() and len(stem) < 10]
    finally:
        os.close(listing_fd)
