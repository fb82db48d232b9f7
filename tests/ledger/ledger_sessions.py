"""Sessions in a real ledger, for tests of what stands beside it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

from perdure.domain import ids
from perdure.domain.event import encode
from perdure.domain.session import SessionConfig
from perdure.domain.submission import SubmissionKey
from perdure.ports.ledger import Advance, Arrival, Created, CreateSession, Perform
from perdure.postgres.ledger import PostgresLedger
from perdure.postgres.pool import ReadPool

WORKSPACE = UUID(int=1)


@asynccontextmanager
async def open_ledger(url: str) -> AsyncGenerator[PostgresLedger]:
    """A ledger with writers of its own, and a workspace."""
    pool = ReadPool(url)
    await pool.execute("insert into workspace (id, name) values ($1, 'test') on conflict do nothing", WORKSPACE)
    ledger = PostgresLedger(url, pool)
    ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()
        await pool.close()


async def make_session(ledger: PostgresLedger, *, messages: int = 1, submission: SubmissionKey | None = None) -> UUID:
    """A session with waiting messages; the first one's, when `submission` says that it is a repeat."""
    session_id = uuid4()
    body = encode({"content": [{"type": "text", "text": "hello"}]})
    created = await ledger.create(
        CreateSession(
            session_id=session_id,
            workspace_id=WORKSPACE,
            profile="managed_agents",
            agent_id=uuid4(),
            agent_version=1,
            environment_id=uuid4(),
            model="scripted",
            config=SessionConfig(session_id=session_id, title="title", metadata=b"{}", agent=b"{}", environment=b"{}"),
            arrivals=tuple(Arrival(kind="message", body=body) for _ in range(messages)),
            submission=submission,
        )
    )
    assert isinstance(created, Created)
    return created.session_id


async def claim(ledger: PostgresLedger, session_id: UUID, worker_id: UUID) -> Perform:
    """Let a worker take the session's next turn."""
    thread_id = ids.primary_thread(session_id)
    answer = await ledger.advance(
        Advance(session_id=session_id, thread_id=thread_id, worker_id=worker_id, command_id=uuid4())
    )
    assert isinstance(answer, Perform)
    return answer
