"""What a server leaves in `credentials.json` for the client verbs, and what it takes back when it goes.

The file names one server of the data directory: the first that was there. Whoever comes while that one answers leaves the file alone,
and whoever goes changes it only while it names himself. The key stays in it for the next start.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli.client import Client
from perdure.cli.credentials import FILE_NAME, Target, read_credentials
from perdure.settings import make_data_directory

if TYPE_CHECKING:
    from perdure.bootstrap import Server


def find_neighbour(data: Path) -> Target | None:
    """The server that the file names, if it answers and knows the key that stands beside it: another one may have its old address."""
    kept = read_credentials(data)
    return None if kept.url is None or kept.api_key is None else still_there(Target(kept.url, kept.api_key))


def still_there(neighbour: Target | None) -> Target | None:
    """The same one, unless it went while we started."""
    if neighbour is None:
        return None
    with contextlib.closing(Client(neighbour)) as client:
        return neighbour if client.is_answering() else None


@contextmanager
def announced(data: Path, server: "Server", neighbour: Target | None) -> Generator[None]:
    """While it is entered the file names this server, or goes on naming its neighbour.

    A crash leaves the address of a server that does not answer; the next start sees that and puts its own there.
    """
    body = {"url": server.url, "api_key": server.api_key, "database_url": server.database_url, "pid": server.pid}
    if neighbour is None:
        make_data_directory(data)
        with _alone(data):
            _write(data, json.dumps(body) + "\n")
    try:
        yield
    finally:
        # A directory that was removed meanwhile has nothing to take back.
        with contextlib.suppress(OSError), _alone(data):
            kept = read_credentials(data)
            if (kept.url, kept.pid) == (server.url, server.pid):
                gone: dict[str, Any] = {**body, "url": None, "pid": None}
                _write(data, json.dumps(gone) + "\n")


def _write(data: Path, content: str) -> None:
    """Readable by the owner alone, whole or not at all."""
    path = data / FILE_NAME
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    fresh.replace(path)


@contextmanager
def _alone(data: Path) -> Generator[None]:
    """One process at a time looks at the file and changes it. The lock goes with the process that holds it."""
    descriptor = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
