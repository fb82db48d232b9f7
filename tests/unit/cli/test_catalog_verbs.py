"""Keys and workspaces, made where the database is."""

import asyncio
import json
import subprocess
import sys
from typing import Any

from tests.conftest import connected

DEADLINE_S = 60


def perdure(url: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a verb with --json; what it printed."""
    command = [sys.executable, "-m", "perdure", *arguments, "--json", "--database-url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else {"error": done.stderr + done.stdout}


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


async def test_looking_changes_no_database(empty_url: str) -> None:
    """One of an older version is left to its servers until somebody says `migrate`."""
    for verb in (("keys", "list"), ("workspaces", "list"), ("workspaces", "create", "acme")):
        told = await asyncio.to_thread(perdure, empty_url, *verb, code=2)
        assert "lacks 0001_ledger" in told["error"] and "`perdure migrate`" in told["error"]
    checks = await asyncio.to_thread(perdure, empty_url, "doctor", code=1)
    assert "lacks 0001_ledger" in str(checks)
    async with connected(empty_url) as connection:
        assert await connection.fetchval("select count(*) from pg_tables where schemaname = 'public'") == 0
    applied = await asyncio.to_thread(perdure, empty_url, "migrate")
    assert applied["applied"][0] == "0001_ledger"
    assert (await asyncio.to_thread(perdure, empty_url, "workspaces", "list"))["data"] == []


def test_what_is_not_there_is_named(database_url: str) -> None:
    assert "no workspace 'acme'" in perdure(database_url, "keys", "create", "--workspace", "acme", code=1)["error"]
    assert perdure(database_url, "migrate") == {"applied": []}
