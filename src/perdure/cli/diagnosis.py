"""What `perdure doctor` looks at: each thing a server needs, whether it holds, and what to do when it doesn't."""

import tempfile
from pathlib import Path

import msgspec

from perdure.bootstrap import open_catalog
from perdure.cli.exits import CommandFailed
from perdure.cli.starting import check_database, check_made
from perdure.environments.local import LocalEnvironment
from perdure.postgres.migrate import MigrationError
from perdure.settings import Settings


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    advice: str = ""


async def diagnose(settings: Settings) -> list[Check]:
    """All the checks. It starts an embedded PostgreSQL that is there but does not run; it makes nothing."""
    return [await _sandbox(settings), await _database(settings), _models(settings)]


async def _sandbox(settings: Settings) -> Check:
    # A data directory that is not there is not made by looking.
    with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as folder:
        data = settings.data if settings.data.is_dir() else Path(folder)
        environment = LocalEnvironment(data.resolve() / "workspaces", unsafe_no_sandbox=settings.unsafe_no_sandbox)
        try:
            problems = await environment.problems()
        finally:
            await environment.close()
    return Check(
        name="sandbox",
        ok=not problems,
        detail="; ".join(problems) or "tools run under bubblewrap",
        advice="Run on Linux with user namespaces, as a normal user, where the data directory can be written."
        if problems
        else "",
    )


async def _database(settings: Settings) -> Check:
    try:
        check_made(settings)
        await check_database(settings)
        async with open_catalog(settings) as catalog:
            count = len(await catalog.read_workspaces())
    except CommandFailed as failed:
        return Check(name="database", ok=False, detail=str(failed))
    except Exception as error:  # noqa: BLE001  whatever it is, it is what doctor is asked for
        says_what_to_do = isinstance(error, MigrationError)
        advice = "" if says_what_to_do else "Check --database-url, or the data directory."
        return Check(name="database", ok=False, detail=str(error), advice=advice)
    workspaces = "1 workspace" if count == 1 else f"{count} workspaces"
    return Check(name="database", ok=True, detail=f"reachable and migrated, {workspaces}")


def _models(settings: Settings) -> Check:
    is_keyed = settings.anthropic_api_key is not None or settings.anthropic_base_url is not None
    return Check(
        name="models",
        ok=True,
        detail="claude-* and local/smollm2" if is_keyed else "local/smollm2 only",
        advice="" if is_keyed else "Set ANTHROPIC_API_KEY to use claude-* models.",
    )
