"""The subject: the real server in a process of its own, with PostgreSQL as everybody gets it.

As a program (`python -m bench.subject '{...}'`) it is that process. `PERDURE_BENCH_PROFILE=FILE` in the environment of the benchmark
makes it write where its time went; the figures of such a run are not to be reported.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.sampler import Sampler

PORTS: Final = range(20_000, 32_000)
"""Below the range that outgoing connections take theirs from: a listener there meets them sooner or later."""

START_S: Final = 60.0
STOP_S: Final = 40.0
ROOMY: Final = {"max_connections": "100"}
"""The embedded PostgreSQL takes 50, which is plenty for the server and too few for a floor of 64 clients."""

PROFILE: Final = "PERDURE_BENCH_PROFILE"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A server that is up."""

    url: str
    api_key: str
    database_url: str
    data: Path
    process: "subprocess.Popen[str]"

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.process.pid


def free_port() -> int:
    """A port that nobody listens on now."""
    for _ in range(1000):
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 20000 and 32000: stop what listens there")


def wait_listening(port: int, deadline_s: float = START_S) -> None:
    """Return once somebody listens on a port."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise RuntimeError(f"nobody listens on port {port} after {deadline_s:g} s") from None
            time.sleep(0.01)


@contextmanager
def data_folder() -> Generator[Path]:
    """A data directory, gone afterwards. `PERDURE_BENCH_DIR` says on which disk."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-bench-", dir=os.environ.get("PERDURE_BENCH_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(data: Path, *, worker: bool, port: int | None = None, settings: Mapping[str, Any] | None = None) -> Subject:
    """Start the server's process and wait until it says that it serves."""
    chosen = {"data": str(data), "port": port or free_port(), **(settings or {})}
    order = json.dumps({"worker": worker, "settings": chosen})
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.subject", order], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the server did not start: it ended with code {process.wait()}")
    ready = json.loads(line)
    return Subject(data=data, process=process, **ready)


def stop(subject: Subject) -> None:
    """End the server in order. Repeatable."""
    if subject.process.poll() is None:
        subject.process.send_signal(signal.SIGTERM)
    subject.process.wait(STOP_S)


@contextmanager
def running(*, worker: bool, settings: Mapping[str, Any] | None = None) -> Generator[Subject]:
    """A server on a new data directory, stopped and gone afterwards.

    Its PostgreSQL is the embedded one with its own settings, but for room for pgbench's clients; we start it, the server attaches.
    """
    from perdure.postgres.embedded import start_embedded

    with data_folder() as data:
        postgres = asyncio.run(start_embedded(data, settings=ROOMY))
        try:
            subject = start(data, worker=worker, settings=settings)
            try:
                yield subject
            finally:
                stop(subject)
        finally:
            asyncio.run(postgres.stop())


def processor_s(pid: int, data: Path) -> tuple[float, float]:
    """Processor time spent so far by a server, and by the PostgreSQL of its data directory."""
    own = psutil.Process(pid).cpu_times()
    postmaster = psutil.Process(int((data / "pg" / "postmaster.pid").read_text().split()[0]))
    total = 0.0
    for process in (postmaster, *postmaster.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return own.user + own.system, total


# ------------------------------------------------------------------------------------------------------------- process


async def _serve(order: dict[str, Any]) -> None:
    from perdure.bootstrap import open_server
    from perdure.settings import load

    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with open_server(load(order["settings"], {}), api=True, worker=order["worker"]) as server:
        ready = {"url": server.url, "api_key": server.api_key, "database_url": server.database_url}
        print(json.dumps(ready), flush=True)
        await told.wait()


def main() -> None:
    """Serve until told to stop."""
    import uvloop

    sampler = Sampler() if os.environ.get(PROFILE) else None
    if sampler is not None:
        sampler.start()
    try:
        uvloop.run(_serve(json.loads(sys.argv[1])))
    finally:
        if sampler is not None:
            sampler.write(Path(os.environ[PROFILE]))


if __name__ == "__main__":
    main()
