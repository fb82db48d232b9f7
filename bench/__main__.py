"""`python -m bench [B1 B2 ...] [--quick]`: measure, print one table, keep the figures as JSON in bench/results/."""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.pairs import Figure, table
from bench.run import FULL, QUICK
from bench.subject import PROFILE

BENCHES = {
    "B1": "bench.b01_admit_latency",
    "B2": "bench.b02_admit_throughput",
    "B3": "bench.b03_fsync_economy",
    "B4": "bench.b04_hot_session",
    "B11": "bench.b11_cold_start",
    "B12": "bench.b12_kill",
}
RESULTS = Path(__file__).parent / "results"


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """What to measure. Ends the program for a name that is no benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all without one")
    parser.add_argument("--quick", action="store_true", help="a short smoke; its figures say nothing")
    given = parser.parse_args(arguments)
    given.only = [name.upper() for name in given.only] or list(BENCHES)
    unknown = [name for name in given.only if name not in BENCHES]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}: choose from {', '.join(BENCHES)}")
    return given


def about() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "profiled": PROFILE in os.environ,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure what was asked for. A benchmark that fails is told, and the others go on."""
    given = read_arguments(arguments)
    size = QUICK if given.quick else FULL
    machine = about()
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    path = RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%S}.json"
    for name in given.only:
        began = time.monotonic()
        try:
            measured = importlib.import_module(BENCHES[name]).measure(size)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failed[name]}", file=sys.stderr, flush=True)
            continue
        figures += measured
        # After each, so that a run that is cut short leaves what it had.
        write(path, machine | {"quick": given.quick}, figures, failed)
        print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{machine['cores']} cores, load {', '.join(f'{n:.1f}' for n in machine['load_average'])} at the start")
    if given.quick:
        print("A smoke: these figures say nothing.")
    print(table(figures))
    write(path, machine | {"quick": given.quick}, figures, failed)
    print(f"\nWritten to {path}")
    return 1 if failed else 0


def write(path: Path, machine: dict[str, Any], figures: Sequence[Figure], failed: dict[str, str]) -> None:
    """Keep everything, raw pairs included."""
    path.parent.mkdir(exist_ok=True)
    rows = [asdict(f) | {"met": f.met} for f in figures]
    path.write_text(json.dumps({"machine": machine, "figures": rows, "failed": failed}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
