"""What is looked at before a server starts, so that a refusal to start says what to do."""

import errno
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from perdure.cli.exits import REFUSED, CommandFailed
from perdure.settings import Settings

DATABASE_S: Final = 15.0
"""A database that was started together with us is up by then."""


def is_taken(host: str, port: int) -> bool:
    """Whether somebody else listens there. Raises `CommandFailed` for an address that can't be had at all."""
    if port == 0:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two may be bound where neither listens yet.
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise CommandFailed(
                f"Can't listen on {host}:{port}: {error}. Choose --host and --port.", code=REFUSED
            ) from None
    return False


def check_address(settings: Settings) -> None:
    """Refuse a port that is taken."""
    if is_taken(settings.host, settings.port):
        raise CommandFailed(
            f"Port {settings.port} on {settings.host} is taken: stop the server that uses it, or choose another with --port "
            "(0 takes a free one).",
            code=REFUSED,
        )


async def check_database(settings: Settings) -> None:
    """Wait for the database that `--database-url` names; an embedded one is started later."""
    if settings.database_url is None:
        return
    from perdure.postgres.embedded import wait_ready

    await wait_ready(settings.database_url, DATABASE_S)


@contextmanager
def explained() -> Generator[None]:
    """Turn what may keep a server from starting into a message for the person. A bug of ours keeps its traceback."""
    from perdure.domain.errors import Unavailable
    from perdure.postgres.embedded import EmbeddedPostgresError
    from perdure.postgres.migrate import MigrationError

    try:
        yield
    except (EmbeddedPostgresError, MigrationError, OSError) as error:
        raise CommandFailed(f"Can't start: {str(error).rstrip('.')}.", code=REFUSED) from error
    except Unavailable as error:
        message = "Can't start: the database went away. `perdure doctor` looks for the reason."
        raise CommandFailed(message, code=REFUSED) from error


def describe_database(settings: Settings) -> str:
    """Where the database is, without its password."""
    if settings.database_url is None:
        return f"embedded, in {str(settings.data)!r}"
    parts = urlsplit(settings.database_url)
    return f"at {parts.hostname or 'a local socket'}, database {parts.path.lstrip('/')!r}"
