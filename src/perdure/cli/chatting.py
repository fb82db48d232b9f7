"""`perdure chat`: one message or many, with a new session or one that is there."""

from perdure.cli.asking import Asker, first_line
from perdure.cli.beginning import Wish, begin_session, check_wish
from perdure.cli.chat import Chat, Ending, converse
from perdure.cli.client import Client
from perdure.cli.exits import FAILED, OK, CommandFailed
from perdure.cli.screen import Screen
from perdure.cli.session_verbs import session_path

GREETING = "Ctrl-C interrupts a turn, Ctrl-D leaves. The session begins with your first message."


class NewChat:
    """A chat whose session is made with its first message: who says nothing leaves nothing behind."""

    def __init__(self, client: Client, wish: Wish, screen: Screen, asker: Asker) -> None:
        self._client = client
        self._wish = wish
        self._screen = screen
        self._asker = asker
        self._chat: Chat | None = None

    def say(self, text: str) -> Ending:
        """See `Talker`."""
        if self._chat is None:
            begun = begin_session(self._client, self._wish, text)
            for note in (*begun.notes, f"Session {begun.session_id}."):
                self._screen.tell(note)
            self._chat = Chat(self._client, begun.session_id, self._screen, self._asker)
        return self._chat.say(text)


def chat(client: Client, session_id: str | None, message: str | None, wish: Wish, screen: Screen, asker: Asker) -> int:
    """Say what there is to say. The exit code is 0 when it ended well."""
    if session_id is None:
        return _say_to_new(client, message, wish, screen, asker)
    status = client.get(session_path(session_id))["status"]
    screen.tell(f"Session {session_id}, {status}.")
    talk = Chat(client, session_id, screen, asker)
    rested = talk.resume()
    if rested is not None and (rested.is_last or not rested.is_good):
        screen.tell(rested.explain())
        if rested.is_last:
            return FAILED
    return converse(talk, asker, screen) if message is None else _outcome(talk.say(message))


def converse_anew(client: Client, wish: Wish, screen: Screen, asker: Asker, *, first: str | None) -> int:
    """A chat with a new session, of which nothing is made before there is something to say."""
    if first is None:
        check_wish(client, wish)
        screen.tell(GREETING)
    return converse(NewChat(client, wish, screen, asker), asker, screen, first=first)


def _say_to_new(client: Client, message: str | None, wish: Wish, screen: Screen, asker: Asker) -> int:
    if message is None:
        return converse_anew(client, wish, screen, asker, first=first_line(asker))
    return _outcome(NewChat(client, wish, screen, asker).say(message))


def _outcome(ending: Ending) -> int:
    if ending.is_good:
        return OK
    raise CommandFailed(ending.explain())
