"""`perdure chat`: one message or many, with a new session or one that is there."""

from perdure.cli.asking import Asker
from perdure.cli.beginning import Wish, begin_session
from perdure.cli.chat import Chat, converse
from perdure.cli.client import Client
from perdure.cli.exits import FAILED, OK, CommandFailed
from perdure.cli.screen import Screen


def chat(client: Client, session_id: str | None, message: str | None, wish: Wish, screen: Screen, asker: Asker) -> int:
    """Say what there is to say. The exit code is 0 when it ended well."""
    if session_id is None:
        begun = begin_session(client, wish, message)
        screen.tell(begun.note or f"Model {begun.model}.")
        session_id = begun.session_id
    elif not session_id.startswith("sesn_"):
        raise CommandFailed(
            f"{session_id!r} is no session id: it starts with sesn_; `perdure sessions list` shows them."
        )
    screen.tell(f"Session {session_id}.")
    talk = Chat(client, session_id, screen, asker)
    rested = talk.resume()
    if rested is not None and (rested.is_last or not rested.is_good):
        screen.tell(rested.explain())
        if rested.is_last:
            return FAILED
    if message is None:
        return converse(talk, asker, screen)
    ending = talk.say(message)
    if ending.is_good:
        return OK
    raise CommandFailed(ending.explain())
