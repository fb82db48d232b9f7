"""A test that can't fail is a defect: each planted fault is caught, and without one nothing is found."""

import asyncio
import contextlib

import pytest
from tests.differential.comparison import ROUGH, Comparison

from perdure.testing.histories import play_all, step_seeds
from perdure.testing.mutants import MUTANTS, Mutant
from perdure.testing.simulator import simulate

STEPS = 40
SOUND_SEEDS = 10
ROUGH_SEEDS = 4
HANG_S = 20.0

IN_MEMORY = [m for m in MUTANTS if m.hunt != "postgres"]
IN_POSTGRES = [m for m in MUTANTS if m.hunt == "postgres"]


def fault_in(mutant: Mutant, seed: int) -> Exception | None:
    """What one seed of the suite that a mutant belongs to finds."""
    try:
        if mutant.hunt == "histories":
            play_all(step_seeds(seed, STEPS))
        else:
            simulate(seed)
    except Exception as error:  # noqa: BLE001  whatever it is, it was seen
        return error
    return None


async def fault_in_postgres(url: str, seed: int) -> Exception | None:
    """The same for the comparison with PostgreSQL."""
    try:
        async with asyncio.timeout(HANG_S):
            await Comparison(url, ROUGH).run(step_seeds(seed, STEPS))
    except Exception as error:  # noqa: BLE001  whatever it is, it was seen
        return error
    return None


def told(found: Exception) -> str:
    """What a finding says; several at once are grouped."""
    if isinstance(found, ExceptionGroup):
        return "\n".join(told(f) for f in found.exceptions)
    return f"{type(found).__name__}: {found}"


@pytest.mark.parametrize("mutant", IN_MEMORY, ids=lambda m: m.name)
def test_each_fault_in_the_rules_is_caught(mutant: Mutant) -> None:
    with mutant.planted():
        seen: list[str] = []
        for seed in range(mutant.budget):
            found = fault_in(mutant, seed)
            seen += [] if found is None else [told(found)]
            if seen and mutant.sign in seen[-1]:
                return
    assert seen != [], f"{mutant.budget} seeds of the {mutant.hunt} did not see it"
    pytest.fail("it was seen by accident only: " + "; ".join(seen))


@pytest.mark.parametrize("mutant", IN_POSTGRES, ids=lambda m: m.name)
async def test_each_fault_in_the_ledger_is_caught(database_url: str, mutant: Mutant) -> None:
    found = None
    with mutant.planted():
        for seed in range(mutant.budget):
            found = found or await fault_in_postgres(database_url, seed)
    assert found is not None, f"{mutant.budget} histories did not see it"
    assert mutant.sign in told(found), "it was seen by accident only"


@pytest.mark.parametrize("hunt", ["histories", "worlds"])
def test_without_a_fault_nothing_is_found(hunt: str) -> None:
    sound = Mutant("sound", "", (), hunt="histories" if hunt == "histories" else "worlds")
    with sound.planted():
        assert [fault_in(sound, seed) for seed in range(SOUND_SEEDS)] == [None] * SOUND_SEEDS


async def test_without_a_fault_the_ledgers_agree_in_rough_weather(database_url: str) -> None:
    assert [await fault_in_postgres(database_url, seed) for seed in range(ROUGH_SEEDS)] == [None] * ROUGH_SEEDS


def test_mutants_are_gone_afterwards() -> None:
    for mutant in MUTANTS:
        before = [getattr(owner, name) for owner, name, _ in mutant.swaps]
        with contextlib.suppress(KeyError), mutant.planted():
            assert all(getattr(owner, name) is new for owner, name, new in mutant.swaps)
            raise KeyError
        assert [getattr(owner, name) for owner, name, _ in mutant.swaps] == before


def test_mutants_have_names_of_their_own() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 14
