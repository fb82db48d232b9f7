"""What the quick commands must not import. Measured, the imports below are nine tenths of the time that they take."""

import json
import subprocess
import sys

HEAVY = (
    "anthropic",
    "asyncpg",
    "httpx2",
    "msgspec",
    "perdure.bootstrap",
    "rich",
    "starlette",
    "typer",
    "uvicorn",
    "uvloop",
)
DEADLINE_S = 60
PROBE = f"""
import json, sys
from perdure.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def loaded_by(*arguments: str) -> tuple[int, list[str], list[str]]:
    """Exit code, heavy modules that were loaded, and the lines of output."""
    command = [sys.executable, "-W", "error", "-c", PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    *lines, last = done.stdout.splitlines()
    code, loaded = json.loads(last)
    return code, loaded, lines


def test_version_loads_nothing_heavy() -> None:
    code, loaded, lines = loaded_by("--version")
    assert (code, loaded) == (0, [])
    assert lines[0].startswith("perdure ")


def test_a_client_verb_loads_no_server() -> None:
    code, loaded, _ = loaded_by("sessions", "list", "--data", "/nowhere")
    assert code == 2
    assert {"perdure.bootstrap", "asyncpg", "starlette", "uvicorn", "anthropic", "rich"}.isdisjoint(loaded)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "perdure", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.startswith("perdure ")
