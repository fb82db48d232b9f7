"""A session's own life: creation, updates, archive, deletion, and inputs taken back."""

from typing import Any
from uuid import UUID

import msgspec

from perdure.core.accept import admit, check, count_retry, record_submission
from perdure.core.draft import Draft
from perdure.core.settle import drop_waiting, end_turn, park_phase, set_phase, settle_input
from perdure.domain import ids
from perdure.domain.barrier import still_owed
from perdure.domain.errors import Refused
from perdure.domain.event import UpdateSnap, encode
from perdure.domain.mailbox import companions
from perdure.domain.session import Session, SessionConfig, Thread, refuse_archive, refuse_delete, refuse_input
from perdure.domain.shape import METADATA_PAIRS_MAX
from perdure.domain.submission import Repeat, decide_submission
from perdure.domain.transcript import Ending
from perdure.ports.ledger import (
    ArchiveSession,
    Created,
    CreateSession,
    DeleteSession,
    Done,
    UpdateSession,
    WithdrawInput,
)

_NOT_FOUND = Refused("not_found", "session_not_found", "Session not found.")


def create(draft: Draft, command: CreateSession) -> Created | Refused:
    """A session, its primary thread and its first inputs.

    Like an admission, a repeat is recognised before anything that may have changed since is looked at: an agent that was archived in
    the meantime, or a model that is no longer there, refuses new sessions only. And it is counted: one retry of each count
    gets the session that the record names.
    """
    key = command.submission
    match decide_submission(key, draft.submissions.get(key.digest) if key else None, draft.now):
        case Refused() as refused:
            return refused
        case Repeat(record):
            count_retry(draft, key, record)
            return Created(session_id=record.session_id, repeat=True)
        case _:
            pass
    if command.refused is not None:
        return command.refused
    thread_id = ids.primary_thread(command.session_id)
    draft.put(_new_session(draft, command))
    draft.put(command.config)
    draft.put(_new_thread(draft, command.session_id, thread_id))
    draft.emit("session.created", thread_id=thread_id, kind=command.profile)
    refused = check(draft, thread_id, command.arrivals)
    if refused is not None:
        return refused
    events = admit(draft, thread_id, command.arrivals, command.authority)
    if key is not None:
        record_submission(draft, key, events)
    return Created(session_id=command.session_id)


def _new_session(draft: Draft, command: CreateSession) -> Session:
    return Session(
        id=command.session_id,
        workspace_id=command.workspace_id,
        profile=command.profile,
        rev=0,
        incarnation=1,
        receipt_seq=0,
        state="open",
        status="idle",
        agent_id=command.agent_id,
        agent_version=command.agent_version,
        environment_id=command.environment_id,
        model=command.model,
        input_tokens=0,
        output_tokens=0,
        cache_read_tokens=0,
        cache_creation_5m_tokens=0,
        cache_creation_1h_tokens=0,
        active_ms=0,
        running_since=None,
        created_at=draft.now,
        updated_at=draft.now,
        archived_at=None,
        seen_at=draft.now,
    )


def _new_thread(draft: Draft, session_id: UUID, thread_id: UUID) -> Thread:
    return Thread(
        session_id=session_id,
        id=thread_id,
        parent_id=None,
        turn_gen=0,
        turn_id=None,
        causal_pos=0,
        waiting_count=0,
        waiting_bytes=0,
        control_count=0,
        command_id=None,
        answer=None,
        created_at=draft.now,
    )


def _refuse_foreign(draft: Draft, workspace_id: UUID) -> Refused | None:
    """Another workspace's session is the same 404 as a missing one."""
    if draft.session_row is None or draft.session.workspace_id != workspace_id:
        return _NOT_FOUND
    return None


def update(draft: Draft, command: UpdateSession) -> Done | Refused:
    """Full replacement per field of the agent, merge patch of the metadata, one event with what changed.

    MA-A1.25: fields of the agent are replaced for this session alone, and only while it is idle. MA-A1.26: one `session.updated` has
    what changed; without a change there is none.
    """
    refused = _refuse_foreign(draft, command.workspace_id) or refuse_input(draft.session.state)
    if refused is not None:
        return refused
    assert draft.config is not None
    if command.agent is not None and draft.session.status != "idle":
        return Refused(
            "conflict", "session_running", "The agent of a session can be changed only while it is idle.", "agent"
        )
    config, changed = _merged(draft.config, command)
    if isinstance(config, Refused):
        return config
    if not changed:
        return Done()
    draft.put(config)
    draft.touch()
    thread_id = next(t.id for t in draft.threads.values() if t.parent_id is None)
    draft.emit(
        "session.updated", thread_id=thread_id, snap=UpdateSnap(fields=tuple(sorted(changed))), body=encode(changed)
    )
    return Done()


def _merged(config: SessionConfig, command: UpdateSession) -> tuple[SessionConfig | Refused, dict[str, Any]]:
    """The configuration after an update, and the fields that are not as before.

    MA-A1.24: null clears the title and deletes a key of the metadata. MA-A1.13: too many pairs after the merge refuse the update.
    """
    changed: dict[str, Any] = {}
    if command.title is not msgspec.UNSET and command.title != config.title:
        changed["title"] = command.title
        config = msgspec.structs.replace(config, title=command.title)
    if command.metadata is not msgspec.UNSET:
        before: dict[str, str] = msgspec.json.decode(config.metadata)
        merged = before | {k: v for k, v in command.metadata.items() if v is not None}
        merged = {k: v for k, v in merged.items() if command.metadata.get(k, v) is not None}
        if len(merged) > METADATA_PAIRS_MAX:
            message = f"metadata would hold {len(merged)} pairs; at most {METADATA_PAIRS_MAX} are allowed."
            return Refused("invalid", "invalid_request_error", message, "metadata"), {}
        if merged != before:
            changed["metadata"] = merged
            config = msgspec.structs.replace(config, metadata=encode(merged))
    if command.agent is not None:
        agent: dict[str, Any] = msgspec.json.decode(config.agent)
        replaced = agent | msgspec.json.decode(command.agent)
        if replaced != agent:
            changed["agent"] = replaced
            config = msgspec.structs.replace(config, agent=encode(replaced))
    return config, changed


def archive(draft: Draft, command: ArchiveSession) -> Done | Refused:
    """MA-A1.29: end a session and keep its history; a parked turn ends with it. A second time changes nothing."""
    refused = _refuse_foreign(draft, command.workspace_id)
    if refused is not None:
        return refused
    session = draft.session
    if session.archived_at is not None and session.state not in ("deleting", "deleted"):
        return Done()
    waiting = sum(t.waiting_count for t in draft.threads.values())
    owed = len(still_owed(tuple(draft.actions.values())))
    refused = refuse_archive(session.state, session.status, waiting_count=waiting, owed_count=owed)
    if refused is not None:
        return refused
    terminated = session.state == "terminated"
    _close_turns(draft, "archived")
    last = session.updated_at
    draft.touch(state="archived", archived_at=draft.now)
    if terminated:
        # It ended then: how long it lasted is settled.
        draft.put(msgspec.structs.replace(draft.session, updated_at=last))
    else:
        set_phase(draft, next(t.id for t in draft.threads.values() if t.parent_id is None), "terminated")
    return Done()


def _close_turns(draft: Draft, ending: Ending) -> None:
    for thread in list(draft.threads.values()):
        turn = draft.turn_of(thread.id)
        if turn is not None:
            end_turn(draft, turn, "cancelled", ending=ending)


def delete(draft: Draft, command: DeleteSession) -> Done | Refused:
    """Raise the fence. Whatever waits is cancelled with that reason.

    MA-C11.2: from this commit on every read finds nothing. MA-C11.6: a deletion that is under way is answered like the first one.
    """
    refused = _refuse_foreign(draft, command.workspace_id)
    if refused is not None:
        return refused
    key = command.submission
    match decide_submission(key, draft.submissions.get(key.digest) if key else None, draft.now):
        case Refused() as misused:
            return misused
        case Repeat(record):
            count_retry(draft, key, record)
            return Done()
        case _:
            pass
    if draft.session.state == "deleting":
        return Done()
    refused = refuse_delete(draft.session.state, draft.session.status)
    if refused is not None:
        return refused
    _close_turns(draft, "deleted")
    for thread in list(draft.threads.values()):
        drop_waiting(draft, thread.id, "cancelled", "session_deleted")
        draft.sleep(thread.id)
    draft.touch(state="deleting", incarnation=draft.session.incarnation + 1)
    if key is not None:
        record_submission(draft, key, ())
    return Done()


def withdraw(draft: Draft, command: WithdrawInput) -> Done | Refused:
    """Take back a waiting input. On an idle session the idle is said again, so that a reader of the list sees it last."""
    refused = _refuse_foreign(draft, command.workspace_id) or refuse_input(draft.session.state)
    if refused is not None:
        return refused
    entry = next((i for i in draft.inputs.values() if i.id == command.input_id), None)
    if entry is None or entry.state != "waiting":
        return Refused(
            "conflict",
            "input_not_waiting",
            "No input with this id waits: it was taken by a turn, settled, or never admitted.",
        )
    waiting = draft.waiting(entry.thread_id)
    for gone in (entry, *companions(entry, waiting)):
        settle_input(draft, gone, "cancelled", "withdrawn")
    turn = draft.turn_of(entry.thread_id)
    if turn is None and not draft.thread(entry.thread_id).waiting_count:
        set_phase(draft, entry.thread_id, "idle", stop_reason="end_turn")
    elif turn is not None and turn.wait == "action":
        park_phase(draft, turn, reissue=True)
    return Done()
