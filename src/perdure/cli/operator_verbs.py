"""`perdure doctor` and `perdure migrate`."""

import asyncio

import msgspec

from perdure.bootstrap import migrate
from perdure.cli.diagnosis import diagnose
from perdure.cli.exits import FAILED, OK
from perdure.cli.starting import check_database, explained
from perdure.cli.table import show_json
from perdure.settings import Settings


def doctor(settings: Settings, *, as_json: bool) -> int:
    """Look at everything a server needs; fail when one thing does not hold."""
    checks = asyncio.run(diagnose(settings))
    is_well = all(check.ok for check in checks)
    if as_json:
        show_json({"ok": is_well, "checks": [msgspec.to_builtins(check) for check in checks]})
        return OK if is_well else FAILED
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
        if check.advice:
            print(f"     {check.advice}")
    return OK if is_well else FAILED


def migrate_database(settings: Settings, *, as_json: bool) -> int:
    """Bring the database up to this version."""

    async def run() -> list[str]:
        await check_database(settings)
        return await migrate(settings)

    with explained(settings):
        applied = asyncio.run(run())
    if as_json:
        show_json({"applied": applied})
        return OK
    for name in applied:
        print(f"applied {name}")
    print("The database is up to date.")
    return OK
