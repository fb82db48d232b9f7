"""The system user that runs PostgreSQL when we are root, because PostgreSQL refuses to be root."""

import contextlib
import os
import pwd
import subprocess
from typing import Final

from perdure.postgres.waiting import EmbeddedPostgresError, FileLock, Patience

SYSTEM_USER: Final = "pgserver"

# Its lock belongs to whoever changes the list of users that lies in it. A folder, so that no file is left behind.
_USERS: Final = "/etc"


def system_user(patience: Patience) -> tuple[int, int]:
    """As root: user and group of `pgserver`, created when missing, else of `postgres`.

    One process at a time creates: of two `useradd` at once the second replaces the first one's entry, and the first
    one's PostgreSQL would run as a user id that nobody has. Raises `EmbeddedPostgresError`.
    """
    found = _find(SYSTEM_USER)
    if found is None:
        lock = FileLock(os.open(_USERS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            while not lock.try_exclusive():
                if not patience.pause():
                    raise EmbeddedPostgresError(
                        f"another process has been creating system user {SYSTEM_USER!r} for too long: create it yourself"
                    )
            found = _find(SYSTEM_USER) or _create()
        finally:
            lock.close()
    if found is None:
        raise EmbeddedPostgresError(
            f"PostgreSQL refuses to run as root, and system user {SYSTEM_USER!r} could not be created: create it, "
            "or run as a normal user"
        )
    return found


def _create() -> tuple[int, int] | None:
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", SYSTEM_USER]
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(command, check=False, capture_output=True)
    return _find(SYSTEM_USER) or _find("postgres")


def _find(name: str) -> tuple[int, int] | None:
    with contextlib.suppress(KeyError):
        entry = pwd.getpwnam(name)
        return entry.pw_uid, entry.pw_gid
    return None
