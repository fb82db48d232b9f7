"""The file `credentials.json` of a data directory, and which server and key the client verbs use.

The server writes the file when it is ready (mode 0600, replaced whole); here it is only read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from perdure.cli.exits import REFUSED, CommandFailed

FILE_NAME: Final = "credentials.json"
URL_VARIABLE: Final = "PERDURE_URL"
KEY_VARIABLE: Final = "PERDURE_API_KEY"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What the last server of a data directory left. A field that is missing or of another type is None."""

    url: str | None = None
    api_key: str | None = None
    pid: int | None = None


class Target(msgspec.Struct, frozen=True):
    """A server and the key for it."""

    url: str
    api_key: str


def read_credentials(data: Path) -> Credentials:
    """What stands in the file; empty when there is none that can be read."""
    try:
        found: Any = json.loads((data / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Credentials()
    if not isinstance(found, dict):
        return Credentials()
    fields = cast("dict[str, Any]", found)
    url, api_key, pid = fields.get("url"), fields.get("api_key"), fields.get("pid")
    return Credentials(
        url=url if isinstance(url, str) else None,
        api_key=api_key if isinstance(api_key, str) else None,
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
        raise CommandFailed(
            f"No server is known: start one with `perdure up` (it leaves {str(data / FILE_NAME)!r}), "
            f"or set {URL_VARIABLE} or --url.",
            code=REFUSED,
        )
    if not chosen_url.startswith(("http://", "https://")):
        raise CommandFailed(f"The URL {chosen_url!r} must start with http:// or https://.", code=REFUSED)
    chosen_key = api_key or environ.get(KEY_VARIABLE)
    if not chosen_key and kept.url is not None and chosen_url == kept.url.rstrip("/"):
        chosen_key = kept.api_key
    if not chosen_key:
        raise CommandFailed(
            f"No API key for {chosen_url} is known: set {KEY_VARIABLE} or --api-key. "
            "`perdure keys create` makes one where the database is.",
            code=REFUSED,
        )
    return Target(chosen_url, chosen_key)
