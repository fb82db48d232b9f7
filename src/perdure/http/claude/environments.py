"""Environments: the cloud kind with open networking, which here is a sandbox on the host that runs the session's tools."""

from typing import Any, Final
from uuid import UUID

import msgspec

from perdure.domain.errors import Refused
from perdure.domain.shape import (
    Misfit,
    join,
    read_array,
    read_choice,
    read_flag,
    read_metadata,
    read_metadata_patch,
    read_name,
    read_object,
    read_text,
    refuse_pairs,
    unsupported,
)
from perdure.http.claude.catalog_page import encode_page, new_id, next_cursor, read_page, to_wire_time_or_null
from perdure.http.claude.wire import ENVIRONMENT, from_wire_id, to_wire_id, to_wire_time
from perdure.http.json_body import decode_body
from perdure.http.query import refuse_unknown
from perdure.http.requests import AnyRoute, Request, Response, Route
from perdure.http.services import Services
from perdure.ports.catalog import EnvironmentRecord

SCOPE: Final = "environments"
NAME_CHARS_MAX: Final = 256
DESCRIPTION_CHARS_MAX: Final = 10_000
FIELDS: Final = ("name", "config", "description", "metadata", "scope")
LIST_KEYS: Final = ("include_archived", "limit", "page")
PACKAGE_SOURCES: Final = ("apt", "cargo", "gem", "go", "npm", "pip")
LIMITED_FIELDS: Final = ("type", "allowed_hosts", "allow_mcp_servers", "allow_package_managers")
UPDATE_TRIES_MAX: Final = 8
"""As for agents."""

NO_ENVIRONMENT: Final = Refused("not_found", "environment_not_found", "Environment not found.")
ARCHIVED: Final = Refused(
    "conflict", "environment_archived", "The environment is archived and can't be changed: create a new one."
)

CLOUD: Final[dict[str, Any]] = {
    "type": "cloud",
    "networking": {"type": "unrestricted"},
    "packages": {"type": "packages", **{source: [] for source in PACKAGE_SOURCES}},
}


# ------------------------------------------------------------------------------------------------------------------- bodies


def new_environment(request: Any) -> dict[str, Any] | Refused:
    """The body of a new environment, with every default filled in."""
    try:
        given = read_object(request, "", known=FIELDS, required=("name",))
        return {
            "name": _read_name(given["name"]),
            "description": _read_description(given.get("description")),
            "metadata": read_metadata(given.get("metadata", {}), "metadata"),
            "scope": _read_scope(given.get("scope")),
            "config": _read_config(given.get("config")),
        }
    except Misfit as misfit:
        return misfit.refused


def updated_environment(body: dict[str, Any], request: Any) -> dict[str, Any] | Refused:
    """The body after an update; equal to the one before when nothing changes.

    Left out keeps, and so does null where the field can't be empty. Metadata is merged: null or an empty string deletes a key (MA-A6.3).
    """
    try:
        given = read_object(request, "", known=FIELDS)
        changed = dict(body)
        if given.get("name") is not None:
            changed["name"] = _read_name(given["name"])
        if "description" in given:
            changed["description"] = _read_description(given["description"])
        if given.get("scope") is not None:
            changed["scope"] = _read_scope(given["scope"])
        if given.get("config") is not None:
            changed["config"] = _read_config(given["config"], stored=body["config"])
        if "metadata" in given:
            patch = read_metadata_patch(given["metadata"], "metadata")
            kept = {k: v for k, v in body["metadata"].items() if k not in patch}
            changed["metadata"] = kept | {k: v for k, v in patch.items() if v}
            refuse_pairs(len(changed["metadata"]), "metadata")
        return changed
    except Misfit as misfit:
        return misfit.refused


def _read_name(value: Any) -> str:
    return read_name(value, "name", most=NAME_CHARS_MAX)


def _read_description(value: Any) -> str | None:
    return None if value is None else read_text(value, "description", most=DESCRIPTION_CHARS_MAX)


def _read_scope(value: Any) -> str:
    if value is not None and read_choice(value, "scope", ("organization", "account")) == "account":
        raise Misfit("scope", "'account' is not accepted here: environments belong to the workspace; leave it out.")
    return "organization"


def _read_config(value: Any, stored: dict[str, Any] | None = None) -> dict[str, Any]:
    """The whole configuration. What this version can't do is refused by name, not ignored."""
    if value is None:
        return CLOUD
    given = read_object(value, "config", required=("type",))
    kind = read_choice(given["type"], "config.type", ("cloud", "self_hosted"))
    if stored is not None and kind != stored["type"]:
        raise Misfit(
            "config.type",
            f"must stay {stored['type']!r}: the type of an environment can't be changed; create another one.",
            code="invalid_config_type_change",
        )
    if kind == "self_hosted":
        raise unsupported("config.type", "the self_hosted environment")
    read_object(given, "config", known=("type", "networking", "packages"))
    packages = _read_packages(given.get("packages"))
    _refuse_limited(given.get("networking"))
    if packages:
        raise unsupported("config.packages", "the installation of packages")
    return CLOUD


def _read_packages(value: Any) -> bool:
    """Whether any package is asked for."""
    if value is None:
        return False
    given = read_object(value, "config.packages", known=("type", *PACKAGE_SOURCES))
    if "type" in given:
        read_choice(given["type"], "config.packages.type", ("packages",))
    asked = False
    for source in PACKAGE_SOURCES:
        if given.get(source) is None:
            continue
        place = join("config.packages", source)
        for index, name in enumerate(read_array(given[source], place)):
            read_text(name, join(place, index), least=1)
            asked = True
    return asked


def _refuse_limited(value: Any) -> None:
    """Raise unless networking is left out or unrestricted. A limit that nothing enforces must not be accepted."""
    if value is None:
        return
    place = "config.networking"
    given = read_object(value, place, required=("type",))
    if read_choice(given["type"], join(place, "type"), ("unrestricted", "limited")) == "unrestricted":
        read_object(given, place, known=("type",))
        return
    read_object(given, place, known=LIMITED_FIELDS)
    for field in ("allow_mcp_servers", "allow_package_managers"):
        if given.get(field) is not None:
            read_flag(given[field], join(place, field))
    hosts = given.get("allowed_hosts")
    for index, host in enumerate([] if hosts is None else read_array(hosts, join(place, "allowed_hosts"))):
        read_text(host, join(place, join("allowed_hosts", index)), least=1)
    raise unsupported(join(place, "type"), "limited networking")


# ------------------------------------------------------------------------------------------------------------------- routes


def to_wire_environment(record: EnvironmentRecord) -> dict[str, Any]:
    """An environment, as the SDK reads it."""
    return {
        "id": to_wire_id(ENVIRONMENT, record.id),
        "type": "environment",
        **msgspec.json.decode(record.body),
        "created_at": to_wire_time(record.created_at),
        "updated_at": to_wire_time(record.updated_at),
        "archived_at": to_wire_time_or_null(record.archived_at),
    }


def _answer(record: EnvironmentRecord) -> Response:
    return Response(200, msgspec.json.encode(to_wire_environment(record)))


def _environment_id(request: Request) -> UUID | None:
    return from_wire_id(ENVIRONMENT, request.params["environment_id"])


async def create_environment(services: Services, request: Request) -> Response | Refused:
    """A new environment; nothing is started for it."""
    given = decode_body(request.body)
    body = given if isinstance(given, Refused) else new_environment(given)
    if isinstance(body, Refused):
        return body
    record = await services.catalog.create_environment(request.workspace_id, new_id(), msgspec.json.encode(body))
    return _answer(record)


async def retrieve_environment(services: Services, request: Request) -> Response | Refused:
    """One environment."""
    environment_id = _environment_id(request)
    if environment_id is None:
        return NO_ENVIRONMENT
    record = await services.catalog.read_environment(request.workspace_id, environment_id)
    return NO_ENVIRONMENT if record is None else _answer(record)


async def list_environments(services: Services, request: Request) -> Response | Refused:
    """A page, newest first."""
    refused = refuse_unknown(request.query, LIST_KEYS)
    if refused is not None:
        return refused
    page = read_page(request.query, request.workspace_id, SCOPE)
    if isinstance(page, Refused):
        return page
    rows = await services.catalog.read_environments(page)
    data = [to_wire_environment(row) for row in rows[: page.limit - 1]]
    return Response(200, encode_page(data, next_cursor(page, SCOPE, rows)))


async def update_environment(services: Services, request: Request) -> Response | Refused:
    """Change what is given. Losing a race to another update means to apply it to what that one left."""
    given = decode_body(request.body)
    if isinstance(given, Refused):
        return given
    environment_id = _environment_id(request)
    if environment_id is None:
        return NO_ENVIRONMENT
    for _ in range(UPDATE_TRIES_MAX):
        record = await services.catalog.read_environment(request.workspace_id, environment_id)
        if record is None:
            return NO_ENVIRONMENT
        before: dict[str, Any] = msgspec.json.decode(record.body)
        after = updated_environment(before, given)
        if isinstance(after, Refused):
            return after
        if record.archived_at is not None:
            return ARCHIVED
        if after == before:
            return _answer(record)
        updated = await services.catalog.update_environment(
            request.workspace_id, environment_id, record.updated_at, msgspec.json.encode(after)
        )
        if isinstance(updated, EnvironmentRecord):
            return _answer(updated)
    return Refused("conflict", "environment_changed", "The environment is being changed by others: try again.")


async def archive_environment(services: Services, request: Request) -> Response | Refused:
    """No more updates and no new sessions; those that use it go on."""
    environment_id = _environment_id(request)
    if environment_id is None:
        return NO_ENVIRONMENT
    record = await services.catalog.archive_environment(request.workspace_id, environment_id)
    return NO_ENVIRONMENT if record is None else _answer(record)


async def delete_environment(services: Services, request: Request) -> Response | Refused:
    """Gone for every later call; sessions keep what they were made with."""
    environment_id = _environment_id(request)
    if environment_id is None or not await services.catalog.delete_environment(request.workspace_id, environment_id):
        return NO_ENVIRONMENT
    return Response(200, msgspec.json.encode({"id": request.params["environment_id"], "type": "environment_deleted"}))


ROUTES: Final[tuple[AnyRoute, ...]] = (
    Route(method="POST", template="/v1/environments", handler=create_environment, sdk_method="environments.create"),
    Route(method="GET", template="/v1/environments", handler=list_environments, sdk_method="environments.list"),
    Route(
        method="GET",
        template="/v1/environments/{environment_id}",
        handler=retrieve_environment,
        sdk_method="environments.retrieve",
    ),
    Route(
        method="POST",
        template="/v1/environments/{environment_id}",
        handler=update_environment,
        sdk_method="environments.update",
    ),
    Route(
        method="POST",
        template="/v1/environments/{environment_id}/archive",
        handler=archive_environment,
        sdk_method="environments.archive",
    ),
    Route(
        method="DELETE",
        template="/v1/environments/{environment_id}",
        handler=delete_environment,
        sdk_method="environments.delete",
    ),
)
