"""Keys and workspaces, made where the database is."""

import json
import subprocess
import sys
from typing import Any

DEADLINE_S = 60


def perdure(url: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a verb with --json; what it printed."""
    command = [sys.executable, "-m", "perdure", *arguments, "--json", "--database-url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else {"error": done.stderr}


def test_a_workspace_gets_a_key_that_can_be_revoked(database_url: str) -> None:
    made = perdure(database_url, "workspaces", "create", "acme")
    assert perdure(database_url, "workspaces", "list")["data"] == [made]
    key = perdure(database_url, "keys", "create", "--workspace", "acme", "--name", "ci")
    assert key["api_key"].startswith(key["hint"])
    assert (key["workspace"], key["workspace_id"], key["name"]) == ("acme", made["id"], "ci")
    perdure(database_url, "keys", "revoke", key["id"])
    (row,) = perdure(database_url, "keys", "list", "--workspace", "acme")["data"]
    assert row["revoked_at"] is not None
    assert "api_key" not in row


def test_what_is_not_there_is_named(database_url: str) -> None:
    assert "no workspace 'acme'" in perdure(database_url, "keys", "create", "--workspace", "acme", code=1)["error"]
    assert perdure(database_url, "migrate") == {"applied": []}
