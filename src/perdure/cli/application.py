"""The verbs of `perdure`, their options and their help. Each one imports what it needs when it is called."""

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.exits import FAILED, OK, REFUSED, CommandFailed, Left

if TYPE_CHECKING:
    from perdure.cli.client import Client
    from perdure.cli.screen import Screen, TextScreen
    from perdure.settings import Settings

EXIT_CODES: Final = "Exit codes: 0 done, 1 failed, 2 wrong usage or refused to start."
LIST_ROWS: Final = 20
ROWS_MAX: Final = 100
INPUT_ROWS: Final = 100
INPUT_ROWS_MAX: Final = 1_000

app = typer.Typer(
    name="perdure",
    help="A self-hosted server for durable agent sessions.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
sessions = typer.Typer(no_args_is_help=True, help="Look at sessions, and archive them.")
inputs = typer.Typer(no_args_is_help=True, help="See where each input of a session is, and take one back.")
keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys, in the database itself.")
workspaces = typer.Typer(no_args_is_help=True, help="Make and list workspaces (tenants), in the database itself.")
for _name, _group in (("sessions", sessions), ("inputs", inputs), ("keys", keys), ("workspaces", workspaces)):
    app.add_typer(_group, name=_name)

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The data directory.", show_default=".perdure"),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url", metavar="URL", help="A PostgreSQL from 15 on. Without it, one runs in the data directory."
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="Where to listen.", show_default="127.0.0.1")]
Port = Annotated[
    int | None,
    typer.Option("--port", min=0, max=65535, help="Where to listen; 0 takes a free one.", show_default="8700"),
]
Engine = Annotated[str | None, typer.Option("--engine", help="embedded is the only one.", show_default=False)]
Bus = Annotated[str | None, typer.Option("--bus", help="auto, inprocess or notify.", show_default=False)]
Unsafe = Annotated[
    bool,
    typer.Option(
        "--unsafe-no-sandbox",
        help="Where no sandbox holds, run tools without one. Whoever reaches the API then owns this host.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs on standard output.")]
Url = Annotated[
    str | None,
    typer.Option("--url", help="The server.", show_default="PERDURE_URL, else the one of the data directory"),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="The key.", show_default="PERDURE_API_KEY, else the one of the data directory"),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="For a new session.", show_default="Claude where the server has a key, else local/smollm2"
    ),
]
Agent = Annotated[str | None, typer.Option("--agent", metavar="ID", help="Begin the session with this agent.")]
Ask = Annotated[bool, typer.Option("--ask", help="In a new session, let every call of a built-in tool wait for a yes.")]
Message = Annotated[str | None, typer.Argument(help="Send this one message and exit. Without it, a chat.")]


# -------------------------------------------------------------------------------------------------------------- processes


@app.command()
def up(
    data: Data = None,
    host: Host = None,
    port: Port = None,
    database_url: DatabaseUrl = None,
    engine: Engine = None,
    bus: Bus = None,
    unsafe_no_sandbox: Unsafe = False,
    as_json: AsJson = False,
) -> int:
    """Run everything in one process: API, engine and, unless --database-url names one, a PostgreSQL of its own."""
    flags = _flags(
        data=data, host=host, port=port, database_url=database_url, engine=engine, bus=bus, unsafe=unsafe_no_sandbox
    )
    return _serve(flags, api=True, worker=True, as_json=as_json)


@app.command()
def serve(
    data: Data = None,
    host: Host = None,
    port: Port = None,
    database_url: DatabaseUrl = None,
    bus: Bus = None,
    as_json: AsJson = False,
) -> int:
    """Run the API alone; workers on the same database run the turns."""
    flags = _flags(data=data, host=host, port=port, database_url=database_url, bus=bus)
    return _serve(flags, api=True, worker=False, as_json=as_json)


@app.command()
def worker(
    data: Data = None,
    database_url: DatabaseUrl = None,
    engine: Engine = None,
    bus: Bus = None,
    unsafe_no_sandbox: Unsafe = False,
    as_json: AsJson = False,
) -> int:
    """Run turns alone, without an API."""
    flags = _flags(data=data, database_url=database_url, engine=engine, bus=bus, unsafe=unsafe_no_sandbox)
    return _serve(flags, api=False, worker=True, as_json=as_json)


@app.command()
def run(
    message: Message = None,
    data: Data = None,
    port: Port = None,
    database_url: DatabaseUrl = None,
    model: Model = None,
    agent: Agent = None,
    ask: Ask = False,
    unsafe_no_sandbox: Unsafe = False,
) -> int:
    """Start everything, or use the server that runs in the data directory, and chat with it.

    With MESSAGE: send it, print the reply as it comes and then the events, and exit: 0 when the turn ended well, else 1.
    """
    from perdure.cli.asking import make_asker
    from perdure.cli.beginning import Wish
    from perdure.cli.running import run as run_it

    flags = _flags(data=data, port=port, database_url=database_url, unsafe=unsafe_no_sandbox)
    # The terminal is for the chat; what is worth a warning still shows.
    settings = _settings({"log_level": "warning", **flags})
    wish = Wish(model=model, agent_id=agent, ask=ask)
    return run_it(settings, message, wish, _text_screen(), make_asker(), port_given=port is not None)


@app.command()
def migrate(data: Data = None, database_url: DatabaseUrl = None, as_json: AsJson = False) -> int:
    """Bring the database up to this version. Starting a server does the same."""
    from perdure.cli.operator_verbs import migrate_database

    return migrate_database(_settings(_flags(data=data, database_url=database_url)), as_json=as_json)


@app.command()
def doctor(
    data: Data = None, database_url: DatabaseUrl = None, unsafe_no_sandbox: Unsafe = False, as_json: AsJson = False
) -> int:
    """Look at everything a server needs, and say what to do about what does not hold. Fails when one thing does not."""
    from perdure.cli.operator_verbs import doctor as look

    return look(_settings(_flags(data=data, database_url=database_url, unsafe=unsafe_no_sandbox)), as_json=as_json)


# ---------------------------------------------------------------------------------------------------------------- sessions


@app.command()
def chat(
    message: Message = None,
    session: Annotated[str | None, typer.Option("--session", metavar="ID", help="Go on with this session.")] = None,
    agent: Agent = None,
    model: Model = None,
    ask: Ask = False,
    url: Url = None,
    api_key: ApiKey = None,
    data: Data = None,
    as_json: AsJson = False,
) -> int:
    """Talk to a session of a running server: streams replies, asks for approvals.

    Ctrl-C interrupts the running turn, a second one within two seconds leaves; Ctrl-D leaves. The session stays either way.
    """
    from perdure.cli.asking import check_message, make_asker
    from perdure.cli.beginning import Wish
    from perdure.cli.chatting import chat as talk

    check_message(message)
    if session is not None and (agent is not None or model is not None or ask):
        raise CommandFailed(
            "--agent, --model and --ask are for a new session: leave them out, or leave out --session.", code=REFUSED
        )
    screen = _json_screen() if as_json else _text_screen()
    with _client(data, url, api_key) as client:
        return talk(client, session, message, Wish(model=model, agent_id=agent, ask=ask), screen, make_asker())


@sessions.command("list")
def list_sessions(
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only these; may be given several times.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=ROWS_MAX)] = LIST_ROWS,
    archived: Annotated[bool, typer.Option("--archived", help="Archived ones too.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data: Data = None,
    as_json: AsJson = False,
) -> int:
    """The newest sessions of the key's workspace."""
    from perdure.cli import session_verbs

    with _client(data, url, api_key) as client:
        return session_verbs.list_sessions(
            client, limit=limit, statuses=status or [], archived=archived, as_json=as_json
        )


@sessions.command("show")
def show_session(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    url: Url = None,
    api_key: ApiKey = None,
    data: Data = None,
    as_json: AsJson = False,
) -> int:
    """One session: its status, model, agent, and the tokens that it used."""
    from perdure.cli import session_verbs

    with _client(data, url, api_key) as client:
        return session_verbs.show_session(client, session, as_json=as_json)


@sessions.command("archive")
def archive_session(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    url: Url = None,
    api_key: ApiKey = None,
    data: Data = None,
    as_json: AsJson = False,
) -> int:
    """Let a session take no more input. Its events stay; there is no way back."""
    from perdure.cli import session_verbs

    with _client(data, url, api_key) as client:
        return session_verbs.archive_session(client, session, as_json=as_json)


@inputs.command("list")
def list_inputs(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    limit: Annotated[int, typer.Option("--limit", min=1, max=INPUT_ROWS_MAX)] = INPUT_ROWS,
    url: Url = None,
    api_key: ApiKey = None,
    data: Data = None,
    as_json: AsJson = False,
) -> int:
    """Where each input is: waiting, claimed, consumed, dropped, and why; newest first."""
    from perdure.cli import session_verbs

    with _client(data, url, api_key) as client:
        return session_verbs.list_inputs(client, session, limit=limit, as_json=as_json)


@inputs.command("withdraw")
def withdraw_input(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    input_id: Annotated[str, typer.Argument(metavar="INPUT", help="The input's id, as `inputs list` shows it.")],
    url: Url = None,
    api_key: ApiKey = None,
    data: Data = None,
    as_json: AsJson = False,
) -> int:
    """Take back an input that no turn has taken yet."""
    from perdure.cli import session_verbs

    with _client(data, url, api_key) as client:
        return session_verbs.withdraw_input(client, session, input_id, as_json=as_json)


# ----------------------------------------------------------------------------------------------------- keys and workspaces


@keys.command("create")
def create_key(
    workspace: Annotated[str, typer.Option("--workspace", metavar="NAME", help="Whose data it opens.")] = "default",
    name: Annotated[str, typer.Option("--name", help="To tell keys apart.")] = "cli",
    data: Data = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Make an API key. It is shown this once."""
    from perdure.cli import catalog_verbs

    settings = _settings(_flags(data=data, database_url=database_url))
    return catalog_verbs.create_key(settings, workspace=workspace, name=name, as_json=as_json)


@keys.command("list")
def list_keys(
    workspace: Annotated[str | None, typer.Option("--workspace", metavar="NAME", help="Only this one's.")] = None,
    data: Data = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """The keys, by their first characters: the secrets are not kept."""
    from perdure.cli import catalog_verbs

    settings = _settings(_flags(data=data, database_url=database_url))
    return catalog_verbs.list_keys(settings, workspace=workspace, as_json=as_json)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `keys list` shows it.")],
    data: Data = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Refuse a key from now on, also on streams that it holds open."""
    from perdure.cli import catalog_verbs

    return catalog_verbs.revoke_key(_settings(_flags(data=data, database_url=database_url)), key_id, as_json=as_json)


@workspaces.command("create")
def create_workspace(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    data: Data = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Make a workspace: its sessions, agents and keys are out of reach for all others."""
    from perdure.cli import catalog_verbs

    settings = _settings(_flags(data=data, database_url=database_url))
    return catalog_verbs.create_workspace(settings, name, as_json=as_json)


@workspaces.command("list")
def list_workspaces(data: Data = None, database_url: DatabaseUrl = None, as_json: AsJson = False) -> int:
    """All workspaces, oldest first."""
    from perdure.cli import catalog_verbs

    return catalog_verbs.list_workspaces(_settings(_flags(data=data, database_url=database_url)), as_json=as_json)


# ------------------------------------------------------------------------------------------------------------------- parts


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Messages for the person go to standard error."""
    try:
        outcome: Any = app(list(arguments), prog_name="perdure", standalone_mode=False)
    except CommandFailed as failed:
        print(f"perdure: {failed}", file=sys.stderr)
        return failed.code
    except typer.TyperException as wrong:
        # Without a verb there is no message: the help was shown.
        if wrong.format_message():
            print(
                f"perdure: {wrong.format_message()}\nTry `perdure --help`, or `perdure VERB --help`.", file=sys.stderr
            )
        return REFUSED
    except Left:
        return FAILED
    except (typer.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # Whoever read our output has enough. Nothing may be flushed into it on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if outcome in (None, OK):
        return OK
    return REFUSED if outcome == REFUSED else FAILED


def _flags(*, unsafe: bool = False, **given: Any) -> dict[str, Any]:
    """What was given on the command line, by the names of the settings."""
    flags = {name: value for name, value in given.items() if value is not None}
    return {**flags, "unsafe_no_sandbox": True} if unsafe else flags


def _settings(flags: dict[str, Any]) -> "Settings":
    from perdure.settings import BadSetting, load, unknown_variables

    for name in unknown_variables(os.environ):
        print(
            f"perdure: nothing reads the environment variable {name}: is it misspelt, or another program's?",
            file=sys.stderr,
        )
    try:
        return load(flags)
    except BadSetting as bad:
        raise CommandFailed(str(bad), code=REFUSED) from None


def _serve(flags: dict[str, Any], *, api: bool, worker: bool, as_json: bool) -> int:
    from perdure.cli.serving import Roles, serve

    return serve(_settings(flags), Roles(api=api, worker=worker), as_json=as_json)


@contextmanager
def _client(data: Path | None, url: str | None, api_key: str | None) -> "Generator[Client]":
    from perdure.cli.client import Client
    from perdure.cli.credentials import find_target

    settings = _settings(_flags(data=data))
    client = Client(find_target(settings.data, os.environ, url=url, api_key=api_key))
    try:
        yield client
    finally:
        client.close()


def _text_screen() -> "TextScreen":
    from perdure.cli.screen import TextScreen

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return TextScreen(sys.stdout, sys.stderr, colour=colour)


def _json_screen() -> "Screen":
    from perdure.cli.screen import JsonScreen

    return JsonScreen(sys.stdout, sys.stderr)
