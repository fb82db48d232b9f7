"""The file `credentials.json` of a data directory, and which server and key the client verbs use.

A server leaves the file when it is ready; see `announcing`. Here it is only read.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from perdure.cli.exits import REFUSED, CommandFailed
from perdure.settings import DEFAULT_DATA, is_header_value, is_web_url

FILE_NAME: Final = "credentials.json"
URL_VARIABLE: Final = "PERDURE_URL"
KEY_VARIABLE: Final = "PERDURE_API_KEY"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What the last server of a data directory left. A field that is missing or of another type is None."""

    url: str | None = None
    """None when no server runs there, as far as the file knows."""
    api_key: str | None = None
    database_url: str | None = None
    pid: int | None = None
    damage: str | None = None
    """Why there is a file that can't be read."""


class Target(msgspec.Struct, frozen=True):
    """A server and the key for it."""

    url: str
    api_key: str


def read_credentials(data: Path) -> Credentials:
    """What stands in the file; empty when there is none that can be read."""
    try:
        found: Any = json.loads((data / FILE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Credentials()
    except OSError as error:
        return Credentials(damage=error.strerror or str(error))
    except ValueError:
        return Credentials(damage="it is not JSON")
    if not isinstance(found, dict):
        return Credentials(damage="it is not a JSON object")
    fields = cast("dict[str, Any]", found)
    url, api_key, pid = fields.get("url"), fields.get("api_key"), fields.get("pid")
    if not (isinstance(url, str | None) and isinstance(api_key, str | None)):
        return Credentials(damage="url and api_key are not text")
    if not (url is None or is_web_url(url)) or not (api_key is None or is_header_value(api_key)):
        return Credentials(damage="its url is no URL, or its api_key no key")
    database_url = fields.get("database_url")
    return Credentials(
        url=url,
        api_key=api_key,
        database_url=database_url if isinstance(database_url, str) else None,
        pid=pid if isinstance(pid, int) else None,
    )


def find_target(
    data: Path, environ: Mapping[str, str], *, url: str | None = None, api_key: str | None = None
) -> Target:
    """The server to talk to: from the flags, else the environment, else the data directory, each of the two values by itself.

    The key of the data directory goes only to the server that stands beside it in the file.
    """
    kept = read_credentials(data)
    chosen_url = (url or environ.get(URL_VARIABLE) or kept.url or "").rstrip("/")
    if not chosen_url:
        raise _no_server(data, kept)
    _check_url(chosen_url)
    chosen_key = api_key or environ.get(KEY_VARIABLE)
    if not chosen_key and kept.url is not None and chosen_url == kept.url.rstrip("/"):
        chosen_key = kept.api_key
    if not chosen_key:
        raise CommandFailed(
            f"No API key for {chosen_url} is known: set {KEY_VARIABLE} or --api-key. "
            "`perdure keys create` makes one where the database is.",
            code=REFUSED,
        )
    if not is_header_value(chosen_key):
        raise CommandFailed("The API key can't be used: it has blanks or characters that no key has.", code=REFUSED)
    return Target(chosen_url, chosen_key)


def data_option(data: Path) -> str:
    """What to add to a command so that it means this data directory: nothing for the default one."""
    return "" if data == Path(DEFAULT_DATA) else f" --data {shlex.quote(str(data))}"


def _no_server(data: Path, kept: Credentials) -> CommandFailed:
    path = str(data / FILE_NAME)
    start = f"`perdure up{data_option(data)}`"
    if kept.damage is not None:
        message = f"{path!r} is damaged ({kept.damage}): {start} writes it anew, or set {URL_VARIABLE} or --url."
    elif kept.api_key is not None:
        message = f"No server runs in {str(data)!r}: start one with {start}, or set {URL_VARIABLE} or --url."
    else:
        message = f"No server is known: start one with {start} (it leaves {path!r}), or set {URL_VARIABLE} or --url."
    return CommandFailed(message, code=REFUSED)


def _check_url(url: str) -> None:
    if not is_web_url(url):
        raise CommandFailed(f"The URL {url!r} can't be used: it must start with http:// or https://.", code=REFUSED)
