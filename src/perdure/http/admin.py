"""What no SDK has: where each input of a session is, and taking one back. Answers and errors have the form of the Claude face."""

from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain import ids
from perdure.domain.errors import Refused
from perdure.domain.mailbox import Input
from perdure.http.query import read_limit, refuse_unknown
from perdure.http.requests import AnyRoute, Request, Response, Route
from perdure.http.services import Services
from perdure.ports.ledger import WithdrawInput

INPUTS_DEFAULT: Final = 100
INPUTS_MAX: Final = 1_000
"""As many as may wait in one thread."""

NO_SESSION: Final = Refused("not_found", "session_not_found", "Session not found.")
NO_INPUT: Final = Refused("not_found", "input_not_found", "Input not found.")


def _instant(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat().replace("+00:00", "Z")


def _to_wire_input(entry: Input) -> dict[str, Any]:
    """The custody of one input."""
    return {
        "id": "sevt_" + ids.token(entry.id),
        "type": "input",
        "kind": entry.kind,
        "state": entry.state,
        "reason": entry.reason,
        "receipt_seq": entry.seq,
        "turn_id": None if entry.turn_id is None else "turn_" + ids.token(entry.turn_id),
        "received_at": _instant(entry.received_at),
        "settled_at": _instant(entry.settled_at),
    }


async def _session_id(services: Services, request: Request) -> UUID | Refused:
    session_id = ids.parse_wire(request.params["session_id"], "sesn_")
    if session_id is None or await services.ledger.read_session(request.workspace_id, session_id) is None:
        return NO_SESSION
    return session_id


async def list_inputs(services: Services, request: Request) -> Response | Refused:
    """The custody of a session's inputs, newest first."""
    refused = refuse_unknown(request.query, ("limit",))
    if refused is not None:
        return refused
    limit = read_limit(request.query, default=INPUTS_DEFAULT, most=INPUTS_MAX)
    if isinstance(limit, Refused):
        return limit
    session_id = await _session_id(services, request)
    if isinstance(session_id, Refused):
        return session_id
    inputs = await services.ledger.read_inputs(session_id, limit=limit)
    return Response(200, msgspec.json.encode({"data": [_to_wire_input(entry) for entry in inputs]}))


async def withdraw_input(services: Services, request: Request) -> Response | Refused:
    """Take back an input that no turn has taken yet."""
    session_id = await _session_id(services, request)
    if isinstance(session_id, Refused):
        return session_id
    input_id = ids.parse_wire(request.params["input_id"], "sevt_")
    if input_id is None:
        return NO_INPUT
    outcome = await services.ledger.withdraw(
        WithdrawInput(session_id=session_id, workspace_id=request.workspace_id, input_id=input_id)
    )
    if isinstance(outcome, Refused):
        return outcome
    return Response(200, msgspec.json.encode({"id": request.params["input_id"], "type": "input_withdrawn"}))


ROUTES: Final[tuple[AnyRoute, ...]] = (
    Route(
        method="GET",
        template="/perdure/v1/sessions/{session_id}/inputs",
        handler=list_inputs,
        sdk_method="perdure.inputs.list",
    ),
    Route(
        method="POST",
        template="/perdure/v1/sessions/{session_id}/inputs/{input_id}/withdraw",
        handler=withdraw_input,
        sdk_method="perdure.inputs.withdraw",
    ),
)
