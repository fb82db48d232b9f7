"""Environments, through the real SDK over a socket."""

import asyncio
from typing import Any
from uuid import uuid4

import anthropic
import pytest
from tests.unit.http.serving import Serving

from perdure.domain import ids


@pytest.mark.rule("MA-A6.1", "SDK:environments.create", "SDK:environments.retrieve")
@pytest.mark.parametrize(
    "config",
    [
        anthropic.NOT_GIVEN,
        None,
        {"type": "cloud"},
        {"type": "cloud", "networking": {"type": "unrestricted"}, "packages": {"type": "packages", "pip": []}},
        {"type": "cloud", "networking": None, "packages": None},
    ],
)
async def test_create_answers_the_whole_cloud_config(serving: Serving, config: Any) -> None:
    async with serving.sdk() as client:
        created = await client.beta.environments.create(name="E", config=config)
        raw = await client.beta.environments.with_raw_response.retrieve(created.id)
    assert created.id.startswith("env_") and created.type == "environment"
    assert created.config.to_dict() == {
        "type": "cloud",
        "networking": {"type": "unrestricted"},
        "packages": {"type": "packages", "apt": [], "cargo": [], "gem": [], "go": [], "npm": [], "pip": []},
    }
    assert (created.description, created.metadata, created.archived_at) == (None, {}, None)
    assert set(type(created).model_fields) == set(raw.http_response.json())


LIMITED = {"type": "limited", "allowed_hosts": ["example.com"]}


@pytest.mark.rule("MA-A6.5", "MA-A6.8", "MA-A6.9", "MA-A0.9", "MA-A0.10", "MA-A0.11")
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "name"),
        ({"name": None}, "name"),
        ({"name": ""}, "name"),
        ({"name": " \t"}, "name: must not be blank"),
        ({"name": "E", "metadata": None}, "metadata"),
        ({"name": "E", "metadata": {"k": None}}, "metadata.k"),
        ({"name": "E", "metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"name": "E", "size": 1}, "size"),
        ({"name": "E", "scope": "account"}, "scope"),
        ({"name": "E", "config": {}}, "config.type"),
        ({"name": "E", "config": {"type": "self_hosted"}}, "config.type"),
        ({"name": "E", "config": {"type": "cloud", "cpu": 2}}, "config.cpu"),
        ({"name": "E", "config": {"type": "cloud", "networking": LIMITED}}, "config.networking"),
        ({"name": "E", "config": {"type": "cloud", "networking": {"type": "none"}}}, "config.networking.type"),
        ({"name": "E", "config": {"type": "cloud", "packages": {"pip": ["numpy"]}}}, "config.packages"),
        ({"name": "E", "config": {"type": "cloud", "packages": {"pip": "numpy"}}}, "config.packages.pip"),
        (
            {"name": "E", "config": {"type": "cloud", "networking": LIMITED, "packages": {"pip": ["numpy"]}}},
            "config.networking.type: limited networking is not built yet",
        ),
    ],
)
async def test_a_bad_create_is_400_names_its_field_and_stores_nothing(
    serving: Serving, body: dict[str, Any], named: str
) -> None:
    async with serving.http() as http:
        answer = await http.post("/v1/environments", headers=serving.signed(), json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(named)
    assert "create_environment" not in serving.catalog.calls


@pytest.mark.rule("MA-A6.3", "SDK:environments.update")
async def test_update_merges_what_is_given(serving: Serving) -> None:
    async with serving.sdk() as client:
        environments = client.beta.environments
        first = await environments.create(name="E", description="d", metadata={"a": "1", "b": "2", "e": ""})
        second = await environments.update(first.id, metadata={"a": None, "b": "", "c": "3"}, config={"type": "cloud"})
        assert second.metadata == {"c": "3", "e": ""}
        assert (second.name, second.description, second.config) == ("E", "d", first.config)
        assert (await environments.update(first.id, name=None)).name == first.name
        third = await environments.update(first.id, description=None, name="F")
        assert (third.name, third.description) == ("F", None)
        same = await environments.update(first.id, name="F")
        assert same.updated_at == third.updated_at > first.updated_at
        await asyncio.gather(*(environments.update(first.id, metadata={f"k{n}": "v"}) for n in range(4)))
        assert set((await environments.retrieve(first.id)).metadata) == {"c", "e", "k0", "k1", "k2", "k3"}


@pytest.mark.rule("MA-A6.4")
async def test_the_type_of_a_config_cannot_change(serving: Serving) -> None:
    async with serving.sdk() as client:
        environment = await client.beta.environments.create(name="E")
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.environments.update(environment.id, config={"type": "self_hosted"})
        assert caught.value.error_code == "invalid_config_type_change"
        assert await client.beta.environments.retrieve(environment.id) == environment


@pytest.mark.rule("MA-A6.2", "MA-A6.6", "MA-A6.7", "SDK:environments.archive", "SDK:environments.delete")
async def test_archive_ends_updates_and_delete_ends_everything(serving: Serving) -> None:
    async with serving.sdk() as client:
        environments = client.beta.environments
        environment = await environments.create(name="E")
        archived = await environments.archive(environment.id)
        assert archived.archived_at == archived.updated_at > environment.updated_at
        assert await environments.archive(environment.id) == archived
        with pytest.raises(anthropic.BadRequestError) as caught:
            await environments.update(environment.id, name="F")
        assert caught.value.error_code == "environment_archived"
        assert (await environments.list()).data == []
        assert [e.id for e in (await environments.list(include_archived=True)).data] == [environment.id]
        deleted = await environments.delete(environment.id)
        assert (deleted.id, deleted.type) == (environment.id, "environment_deleted")
        for call in (
            environments.retrieve(environment.id),
            environments.update(environment.id, name="F"),
            environments.archive(environment.id),
            environments.delete(environment.id),
        ):
            with pytest.raises(anthropic.NotFoundError):
                await call


@pytest.mark.rule("MA-A6.2", "MA-A0.23", "SDK:environments.list")
async def test_lists_are_newest_first_and_whole_across_pages(serving: Serving) -> None:
    async with serving.sdk() as client:
        made = [await client.beta.environments.create(name=f"E{n}") for n in range(7)]
        for limit in (1, 3, 7, 100):
            seen = [environment.id async for environment in client.beta.environments.list(limit=limit)]
            assert seen == [environment.id for environment in reversed(made)]


@pytest.mark.rule("MA-A0.19", "MA-A0.20")
async def test_foreign_missing_and_malformed_ids_answer_alike(serving: Serving) -> None:
    other, _ = await serving.add_key(uuid4())
    async with serving.sdk() as client, serving.sdk(key=other.secret) as stranger:
        foreign = (await stranger.beta.environments.create(name="E")).id
        texts: set[str] = set()
        for identity in (foreign, "env_" + ids.token(uuid4()), "env_x", "nonsense"):
            for call in (
                client.beta.environments.retrieve(identity),
                client.beta.environments.update(identity, name="F"),
                client.beta.environments.archive(identity),
                client.beta.environments.delete(identity),
            ):
                with pytest.raises(anthropic.NotFoundError) as caught:
                    await call
                response = caught.value.response
                texts.add(response.text.replace(response.headers["request-id"], ""))
        assert len(texts) == 1
        assert (await stranger.beta.environments.retrieve(foreign)).name == "E"
