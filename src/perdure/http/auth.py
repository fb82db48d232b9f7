"""Who asks: the key in the headers, and the workspace that it belongs to."""

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from perdure.core.auth import Authenticator
from perdure.domain import ids
from perdure.domain.errors import Refused
from perdure.ports.catalog import KeyRecord

WORKSPACE_PREFIX: Final = "wrkspc_"
WORKSPACE_HEADER: Final = "anthropic-workspace-id"
_BEARER: Final = "bearer "


def workspace_wire_id(workspace_id: UUID) -> str:
    """A workspace as clients name it."""
    return WORKSPACE_PREFIX + ids.token(workspace_id)


def read_secret(headers: Mapping[str, str]) -> str | Refused:
    """The key of a request (MA-A0.1 to MA-A0.3). Messages never repeat it."""
    authorization = headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""
    own = headers.get("x-api-key", "").strip()
    if bearer and own and bearer != own:
        return _unauthenticated("two_api_keys", "Authorization and x-api-key carry different keys: send one of them.")
    if not bearer and not own:
        return _unauthenticated(
            "no_api_key", "No API key: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'."
        )
    return bearer or own


async def authenticate(authenticator: Authenticator, headers: Mapping[str, str]) -> KeyRecord | Refused:
    """The valid key of a request. Raises Unavailable while keys can't be looked up."""
    secret = read_secret(headers)
    if isinstance(secret, Refused):
        return secret
    record = await authenticator.authenticate(secret)
    if record is None:
        return _unauthenticated(
            "unknown_api_key", "The API key is unknown or revoked: check it, or make one with 'perdure keys create'."
        )
    named = headers.get(WORKSPACE_HEADER)
    if named is not None and named != workspace_wire_id(record.workspace_id):
        return Refused(
            "forbidden",
            "workspace_mismatch",
            f"{WORKSPACE_HEADER}: must be left out or name the workspace of the key.",
            WORKSPACE_HEADER,
        )
    return record


def _unauthenticated(code: str, message: str) -> Refused:
    return Refused("unauthenticated", code, message)
