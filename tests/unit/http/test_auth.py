"""Keys: their form, how long one is believed, and what revoking does."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from uuid import UUID

import anthropic
import pytest
from tests.unit.http.serving import VERSION, Serving

from perdure.core.auth import CACHE_MAX, FORM, Authenticator, digest_of, make_key
from perdure.domain.errors import Unavailable
from perdure.http.auth import workspace_wire_id
from perdure.ports.catalog import KeyRecord
from perdure.testing.oracle_catalog import OracleCatalog
from perdure.testing.signals import Signal

WORKSPACE, KEY_ID = UUID(int=7), UUID(int=8)
KEY = make_key(bytes(range(32)))
UNKNOWN = make_key(bytes(32)).secret


async def catalog_with_key() -> OracleCatalog:
    catalog = OracleCatalog()
    await catalog.create_key(KEY_ID, WORKSPACE, "k", KEY.digest, KEY.hint)
    return catalog


def test_a_key_has_256_bits_and_only_its_digest_is_kept() -> None:
    assert FORM.fullmatch(KEY.secret) and len(KEY.secret) == 46
    assert digest_of(KEY.secret) == KEY.digest and KEY.secret.startswith(KEY.hint)
    assert make_key(bytes(32)).secret != KEY.secret


async def test_a_valid_key_is_looked_up_once_in_its_second() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog, cache_s=60)
    first = await authenticator.authenticate(KEY.secret)
    assert first is not None and first.workspace_id == WORKSPACE
    assert await authenticator.authenticate(KEY.secret) == first
    assert catalog.calls.count("find_key") == 1


async def test_requests_at_the_same_moment_share_one_look_up() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog, cache_s=0)
    found = await asyncio.gather(*(authenticator.authenticate(KEY.secret) for _ in range(20)))
    assert all(record is not None for record in found)
    assert catalog.calls.count("find_key") == 1


async def test_a_key_of_the_wrong_form_is_never_looked_up() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog)
    for secret in ("", "pk_", KEY.secret + "x", KEY.secret[:-1], "sk" + KEY.secret[2:], KEY.secret[:-1] + "é"):
        assert await authenticator.authenticate(secret) is None
    assert "find_key" not in catalog.calls


async def test_unknown_keys_are_remembered_within_bounds() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog, cache_s=60)
    for n in range(CACHE_MAX + 10):
        assert await authenticator.authenticate(make_key(n.to_bytes(32, "big")).secret) is None
    assert len(authenticator._cache) == CACHE_MAX  # pyright: ignore[reportPrivateUsage]


async def test_a_revoked_key_is_refused_when_its_second_is_over() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog, cache_s=0)
    assert await authenticator.authenticate(KEY.secret) is not None
    await catalog.revoke_key(KEY_ID)
    assert await authenticator.authenticate(KEY.secret) is None
    assert not await authenticator.still_valid(KEY_ID)


async def test_watched_keys_are_looked_up_once_however_many_streams_they_hold() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog)
    await authenticator.authenticate(KEY.secret)
    told: list[int] = []
    watches = [authenticator.watch(KEY_ID, lambda n=n: told.append(n)) for n in range(50)]
    catalog.calls.clear()
    await authenticator.check_watched()
    assert (catalog.calls, told) == (["find_key"], [])
    watches[0].close()
    await catalog.revoke_key(KEY_ID)
    await authenticator.check_watched()
    assert sorted(told) == list(range(1, 50))
    for watch in watches:
        watch.close()
    catalog.calls.clear()
    await authenticator.check_watched()
    assert catalog.calls == []


async def test_the_last_use_is_written_at_most_every_thirty_seconds() -> None:
    catalog, at = await catalog_with_key(), datetime(2026, 1, 1, tzinfo=UTC)
    authenticator = Authenticator(catalog, now=lambda: at)
    for seconds in (0, 1, 29, 31):
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
        await authenticator.authenticate(KEY.secret)
        await authenticator.flush()
    assert catalog.calls.count("touch_keys") == 2
    (record,) = await catalog.read_keys()
    assert record.last_used_at == datetime(2026, 1, 1, 0, 0, 31, tzinfo=UTC)


async def test_uses_wait_while_the_database_is_away() -> None:
    catalog = await catalog_with_key()
    authenticator = Authenticator(catalog)
    await authenticator.authenticate(KEY.secret)
    catalog.away = True
    with pytest.raises(Unavailable):
        await authenticator.flush()
    catalog.away = False
    await authenticator.flush()
    assert (await catalog.read_keys())[0].last_used_at is not None


async def test_an_error_that_nobody_foresaw_ends_neither_checks_nor_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a revoked key would keep its streams for ever."""
    catalog = await catalog_with_key()
    troubles, told = list[str](), Signal("the key is revoked")
    authenticator = Authenticator(catalog, cache_s=0, check_s=0.001, on_trouble=lambda e: troubles.append(str(e)))
    await authenticator.authenticate(KEY.secret)
    find_key, touch_keys, noted = catalog.find_key, catalog.touch_keys, Signal("the use is written")

    async def find_or_fail(digest: bytes) -> KeyRecord | None:
        if "look" not in troubles:
            raise ValueError("look")
        return await find_key(digest)

    async def touch_or_fail(used: Mapping[UUID, datetime]) -> None:
        if "touch" not in troubles:
            raise ValueError("touch")
        await touch_keys(used)
        noted.set()

    monkeypatch.setattr(catalog, "find_key", find_or_fail)
    monkeypatch.setattr(catalog, "touch_keys", touch_or_fail)
    authenticator.watch(KEY_ID, told.set)
    running = asyncio.create_task(authenticator.run())
    await noted.wait(5)
    await catalog.revoke_key(KEY_ID)
    await told.wait(5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sorted(set(troubles)) == ["look", "touch"]


# ------------------------------------------------------------------------------------------------------------ over a socket


@pytest.mark.rule("MA-A0.1", "MA-A0.3")
async def test_either_header_is_enough_and_both_may_carry_the_same_key(serving: Serving) -> None:
    bearer, own = {"authorization": f"Bearer {serving.key.secret}"}, {"x-api-key": serving.key.secret}
    async with serving.http() as http:
        for headers in (bearer, own, bearer | own):
            assert (await http.get("/v1/agents", headers=VERSION | headers)).status_code == 200


@pytest.mark.rule("MA-A0.3")
async def test_two_different_keys_are_refused(serving: Serving) -> None:
    other, _ = await serving.add_key()
    async with serving.http() as http:
        answer = await http.get("/v1/agents", headers=serving.signed(**{"x-api-key": other.secret}))
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.rule("MA-A0.2", "MA-A0.7")
@pytest.mark.parametrize("secret", ["nonsense", UNKNOWN])
async def test_an_unknown_key_raises_the_sdk_s_authentication_error_and_is_not_repeated(
    serving: Serving, secret: str
) -> None:
    async with serving.sdk(key=secret) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.beta.agents.list()
    assert secret not in caught.value.response.text
    assert serving.requests() == 1


@pytest.mark.rule("MA-A0.2", "MA-E2.3")
async def test_a_revoked_key_is_refused(serving: Serving) -> None:
    async with serving.sdk() as client:
        await client.beta.agents.list()
        await serving.catalog.revoke_key(serving.key_id)
        with pytest.raises(anthropic.AuthenticationError):
            await client.beta.agents.list()


@pytest.mark.rule("MA-A0.2")
async def test_no_key_is_refused_even_where_nothing_is_served(serving: Serving) -> None:
    async with serving.http() as http:
        for path in ("/v1/sessions", "/v1/nothing", "/v1/environments"):
            assert (await http.get(path, headers=VERSION)).status_code == 401


@pytest.mark.rule("MA-A0.21")
async def test_a_named_workspace_must_be_the_key_s(serving: Serving) -> None:
    async with serving.sdk() as client:
        await client.beta.agents.list(workspace_id=workspace_wire_id(serving.workspace_id))
        with pytest.raises(anthropic.PermissionDeniedError):
            await client.beta.agents.list(workspace_id=workspace_wire_id(UUID(int=1)))
