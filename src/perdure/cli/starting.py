"""What is looked at before a server starts, so that a refusal to start says what to do."""

import errno
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from perdure.cli.credentials import data_option
from perdure.cli.exits import REFUSED, CommandFailed
from perdure.settings import Settings

DATABASE_S: Final = 15.0
"""A database that was started together with us is up by then."""


def is_taken(host: str, port: int) -> bool:
    """Whether somebody else listens there. Raises `CommandFailed` for an address that can't be had at all."""
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
                f"Can't listen on {host}:{port}: {_reason(error)}. Choose --host and --port.", code=REFUSED
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


def check_made(settings: Settings) -> None:
    """Refuse a data directory that is not there, for verbs that work with what is: a typing error makes no database."""
    if settings.database_url is not None:
        return
    data = settings.data
    try:
        if (data / "pg").is_dir():
            return
        make = f"`perdure up{data_option(data)}` makes one. "
        if data.is_dir():
            what = f"has no database of its own: {make}"
        elif data.exists():
            what = "is a file. "
        else:
            what = f"does not exist: {make}"
    except OSError as error:
        what = f"can't be read: {_reason(error)}. "
    raise CommandFailed(
        f"The data directory {str(data)!r} {what}Name another with --data, or a database with --database-url.",
        code=REFUSED,
    )


@contextmanager
def explained(settings: Settings, *, refusal: str = "Can't start") -> Generator[None]:
    """Turn what may keep a server from starting into a message for the person. A bug of ours keeps its traceback."""
    from perdure.domain.errors import Unavailable
    from perdure.postgres.embedded import EmbeddedPostgresError
    from perdure.postgres.migrate import MigrationError

    try:
        yield
    except (EmbeddedPostgresError, MigrationError) as error:
        raise CommandFailed(f"{refusal}: {str(error).rstrip('.')}.", code=REFUSED) from error
    except OSError as error:
        raise CommandFailed(f"{refusal}: {_explain(error, settings)}.", code=REFUSED) from error
    except Unavailable as error:
        message = f"{refusal}: the database went away. `perdure doctor` looks for the reason."
        raise CommandFailed(message, code=REFUSED) from error


def _explain(error: OSError, settings: Settings) -> str:
    """What could not be had: the system names a path only where it was asked for one."""
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return f"{settings.host}:{settings.port}: {_reason(error)}; choose others with --host and --port"
    path = settings.data if error.filename is None else error.filename
    return f"{str(path)!r}: {_reason(error)}; choose another directory with --data"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def hang_up_signals() -> tuple[signal.Signals, ...]:
    """SIGHUP, which a closed terminal sends; nothing under nohup, where that is to be ignored."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


def describe_database(settings: Settings) -> str:
    """Where the database is, without its password."""
    if settings.database_url is None:
        return f"embedded, in {str(settings.data)!r}"
    parts = urlsplit(settings.database_url)
    return f"at {parts.hostname or 'a local socket'}, database {parts.path.lstrip('/')!r}"
