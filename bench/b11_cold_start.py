"""B11: from starting the process until the first 2xx of a durable write, with a new data directory and with an old one."""

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import floor
from bench.api import Api
from bench.pairs import Figure, spread
from bench.run import Size
from bench.subject import STOP_S, data_folder, free_port

TARGET_NEW_S = 3.0
TARGET_OLD_S = 1.5


def measure(size: Size) -> list[Figure]:
    """`perdure up`, as a person runs it."""
    new, old, imports, disks = [], [], [], []
    for _ in range(size.starts):
        imports.append(_imports_s())
        with data_folder() as data:
            disks.append(floor.fdatasync_ms(data))
            new.append(_start_s(data))
            old.append(_start_s(data))
    disk_ms = statistics.median(disks)
    return [
        Figure(
            bench="B11", name=name, value=statistics.median(values), target=target, unit="s", disk_ms=disk_ms,
            detail=f"{spread(values)} s in {len(values)} starts; imports alone {spread(imports)} s", raw={"s": values},
        )
        for name, values, target in (
            ("cold start, new data", new, TARGET_NEW_S),
            ("cold start, old data", old, TARGET_OLD_S),
        )
    ]  # fmt: skip


def _start_s(data: Path) -> float:
    """Start it, write something through it, end it in order."""
    command = [sys.executable, "-m", "perdure", "up", "--data", str(data), "--port", str(free_port()), "--json"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=data)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: it ended with code {process.wait()}")
        ready = json.loads(line)
        api = Api(ready["url"], ready["api_key"])
        api.call("POST", "/v1/environments", {"name": "bench", "config": {"type": "cloud"}})
        took = time.perf_counter() - began
        api.close()
        return took
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def _imports_s() -> float:
    """What Python alone needs to read the server's code."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import perdure.cli.serving"], check=True)
    return time.perf_counter() - began
