"""`perdure run`: everything in one process, and a chat with it; or one message, its reply and the events of its turn."""

import contextlib
import signal
import sys
from collections.abc import Generator
from types import FrameType

import msgspec

from perdure.cli.announcing import announced, find_neighbour
from perdure.cli.asking import Asker, check_message, first_line
from perdure.cli.beginning import LOCAL_MODEL, Wish, begin_session
from perdure.cli.chat import Chat
from perdure.cli.chatting import converse_anew
from perdure.cli.client import Client
from perdure.cli.credentials import Target, read_credentials
from perdure.cli.exits import FAILED, OK, CommandFailed, Left
from perdure.cli.screen import TextScreen, Trail
from perdure.cli.starting import check_address, explained, hang_up_signals, is_taken
from perdure.settings import Settings


def run(
    settings: Settings, message: str | None, wish: Wish, screen: TextScreen, asker: Asker, *, port_given: bool
) -> int:
    """Use the server of the data directory if it answers, else start one for as long as this takes."""
    check_message(message)
    first = first_line(asker) if message is None else None
    if wish.model == LOCAL_MODEL or (
        wish.model is None and not settings.anthropic_api_key and not settings.anthropic_base_url
    ):
        settings = msgspec.structs.replace(settings, warm_model=LOCAL_MODEL)
    with _on_termination(), _server(settings, screen, port_given=port_given) as target:
        client = Client(target)
        try:
            if message is not None:
                return _one_message(client, message, wish, screen, asker)
            return converse_anew(client, wish, screen, asker, first=first)
        finally:
            client.close()


def _one_message(client: Client, message: str, wish: Wish, screen: TextScreen, asker: Asker) -> int:
    begun = begin_session(client, wish, message)
    for note in begun.notes:
        screen.tell(note)
    session_id = begun.session_id
    trail = Trail(screen)
    try:
        ending = Chat(client, session_id, trail, asker).say(message)
    except Left:
        return FAILED
    print(f"\nEvents of {session_id}:")
    for line in trail.lines():
        print(line)
    sys.stdout.flush()
    if ending.is_good:
        return OK
    raise CommandFailed(ending.explain())


@contextlib.contextmanager
def _server(settings: Settings, screen: TextScreen, *, port_given: bool) -> Generator[Target]:
    neighbour = find_neighbour(settings.data)
    # One on another database than the one that is named is not what is asked for.
    is_same = settings.database_url in (None, read_credentials(settings.data).database_url)
    if neighbour is not None and is_same:
        screen.tell(f"Using the server at {neighbour.url}.")
        yield neighbour
        return
    with _own_server(settings, screen, neighbour, port_given=port_given) as target:
        yield target


@contextlib.contextmanager
def _own_server(
    settings: Settings, screen: TextScreen, neighbour: Target | None, *, port_given: bool
) -> Generator[Target]:
    if port_given:
        check_address(settings)
    elif is_taken(settings.host, settings.port):
        screen.tell(f"Port {settings.port} is taken; taking a free one.")
        settings = msgspec.structs.replace(settings, port=0)
    from perdure.cli.background import BackgroundServer

    screen.tell(f"Starting PostgreSQL, API and engine in {str(settings.data)!r} ...")
    background = BackgroundServer(settings)
    try:
        with explained(settings):
            server = background.start()
        assert server.url is not None and server.api_key is not None
        screen.tell(f"Ready at {server.url}.")
        with announced(settings.data, server, neighbour):
            yield Target(server.url, server.api_key)
    finally:
        background.stop()


@contextlib.contextmanager
def _on_termination() -> Generator[None]:
    """SIGTERM, and a terminal that is closed, leave like Ctrl-D does: what was started is stopped in order."""

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Left

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, *hang_up_signals())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
