"""The first command of the README, with a real model behind it."""

import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 120


def run(data: Path, message: str) -> "subprocess.CompletedProcess[str]":
    """`make run MSG=...` without make: the verb it calls, with its own data directory and no provider key."""
    keep = {k: v for k, v in os.environ.items() if k not in ("ANTHROPIC_API_KEY", "PERDURE_ANTHROPIC_BASE_URL")}
    command = [sys.executable, "-m", "perdure", "run", "--data", str(data), "--port", "0", "--", message]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=keep, check=False)


def test_one_message_is_answered_by_a_real_model_and_its_events_are_printed(tmp_path: Path) -> None:
    first = run(tmp_path / "data", "What is the capital of France?")
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    for event in (
        "user.message",
        "session.status_running",
        "span.model_request_start",
        "agent.message",
        "session.status_idle",
    ):
        assert event in first.stdout

    again = run(tmp_path / "data", "What is the capital of Spain?")
    assert again.returncode == 0, again.stderr
    assert "agent.message" in again.stdout
