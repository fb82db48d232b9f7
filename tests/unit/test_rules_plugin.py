"""The record of which test proved which rule."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rules_plugin import RULES_OUT_ENV

SUITE = """
import pytest

pytestmark = pytest.mark.case("C-1")

@pytest.fixture
def broken_before():
    raise RuntimeError

@pytest.fixture
def broken_after():
    yield
    raise RuntimeError

@pytest.mark.rule("R-1", "R-2")
@pytest.mark.parametrize("value", ["a@b", "c"])
def test_passes(value): pass

@pytest.mark.rule("R-2")
@pytest.mark.xdist_group("together")
def test_fails(): assert False

@pytest.mark.rule("R-3")
def test_never_begins(broken_before): pass

@pytest.mark.rule("R-3")
def test_breaks_its_teardown(broken_after): pass
"""
PASSED = [
    {"nodeid": "test_suite.py::test_passes[a@b]", "outcome": "passed"},
    {"nodeid": "test_suite.py::test_passes[c]", "outcome": "passed"},
]
FAILED = {"nodeid": "test_suite.py::test_fails", "outcome": "failed"}
BROKEN = [
    {"nodeid": "test_suite.py::test_breaks_its_teardown", "outcome": "error"},
    {"nodeid": "test_suite.py::test_never_begins", "outcome": "error"},
]


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadgroup"]], ids=["alone", "distributed"])
def test_outcomes_are_the_same_from_one_process_and_from_workers(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  rule(*ids): x\n  case(*ids): x\n")
    out = tmp_path / "new" / "rules.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PERDURE_"))}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.rules_plugin", *options, "."],
        cwd=tmp_path,
        env={**environment, RULES_OUT_ENV: str(out), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert json.loads(out.read_text()) == {
        "C-1": sorted([*PASSED, FAILED, *BROKEN], key=lambda test: test["nodeid"]),
        "R-1": PASSED,
        "R-2": [FAILED, *PASSED],
        "R-3": BROKEN,
    }
