"""`make run MSG=...`: the message comes as it was typed."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize(
    "text", ['say "hi"', "$(shell touch made) costs $5", "`touch made`; touch made # '", "$HOME", "-x"]
)
def test_message_is_no_code(tmp_path: Path, text: str, by: str) -> None:
    said = tmp_path / "perdure"
    said.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    said.chmod(0o755)
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "-o", ".venv/.synced", "run", f"RUN={tmp_path}"]
    env = dict(os.environ)
    if by == "argument":
        command.append(f"MSG={text}")
    else:
        env["MSG"] = text
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == f"run|--|{text}|"
    assert [entry.name for entry in tmp_path.iterdir()] == ["perdure"]
