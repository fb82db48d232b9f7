"""The README's example runs as it stands."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A real `perdure up` on a directory of its own, with an embedded PostgreSQL."""
    command = [sys.executable, "-m", "perdure", "up", "--data", str(tmp_path / "data"), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()
            assert server.wait(DEADLINE_S) == 0


def example() -> str:
    """The Python block of the README."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 1
    return blocks[0]


def test_the_readme_example_prints_a_turn_from_message_to_idle(ready: dict[str, str], tmp_path: Path) -> None:
    script = example().replace("http://127.0.0.1:8700", ready["url"]).replace("pk_...", ready["api_key"])
    file = tmp_path / "example.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    types = done.stdout.split()
    assert types[:2] == ["user.message", "session.status_running"]
    assert "agent.message" in types
    assert types[-1] == "session.status_idle"
