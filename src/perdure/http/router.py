"""Where a request belongs: first which face, then which route.

Two SDKs share one port and, for some resources, one path. Paths that only one of them knows decide by themselves; on the others the
headers that the SDKs send do; a base URL with a prefix decides without looking.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias
from urllib.parse import unquote

import msgspec

from perdure.domain.errors import Refused
from perdure.http.requests import AnyRoute, HttpMethod

Face: TypeAlias = Literal["claude", "openai", "perdure"]

CLAUDE_PREFIX: Final = "/claude"
OPENAI_PREFIX: Final = "/openai"
OWN_PREFIX: Final = "/perdure"

OPENAI_PATHS: Final = ("/v1/agents/sessions", "/v1/agents/environments", "/v1/agents/automations")
SHARED_BY_BETA: Final = ("/v1/agents", "/v1/vaults")
"""Both SDKs send their beta header here."""

SHARED_BY_VERSION: Final = ("/v1/files", "/v1/skills")
"""Neither SDK sends a beta header here, but one always sends its version."""

CLAUDE_HEADERS: Final = ("anthropic-version", "anthropic-beta")
OPENAI_HEADER: Final = "openai-beta"


class Chosen(msgspec.Struct, frozen=True):
    """The face, and the path as that face knows it."""

    face: Face
    path: str


def choose_face(path: str, headers: Mapping[str, str]) -> Chosen | Refused:
    """Which face answers. Refused when the headers name both, or none where one is needed; then no face has been chosen."""
    if _under(path, "/v1/sessions"):
        return Chosen("claude", path)
    if _under(path, CLAUDE_PREFIX):
        return Chosen("claude", path[len(CLAUDE_PREFIX) :])
    if _under(path, OPENAI_PREFIX):
        return Chosen("openai", path[len(OPENAI_PREFIX) :])
    if _under(path, OWN_PREFIX):
        return Chosen("perdure", path)
    if any(_under(path, prefix) for prefix in OPENAI_PATHS):
        return Chosen("openai", path)
    claude = any(name in headers for name in CLAUDE_HEADERS)
    if any(_under(path, prefix) for prefix in SHARED_BY_BETA):
        openai = OPENAI_HEADER in headers
        if claude == openai:
            return _ambiguous(path, both=claude)
        return Chosen("claude" if claude else "openai", path)
    if any(_under(path, prefix) for prefix in SHARED_BY_VERSION):
        return Chosen("claude" if "anthropic-version" in headers else "openai", path)
    return Chosen("claude", path)


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def _ambiguous(path: str, *, both: bool) -> Refused:
    found = "headers of both" if both else "headers of neither"
    return Refused(
        "invalid",
        "ambiguous_face",
        f"Two APIs share {path!r} and the request has {found}: send anthropic-version or anthropic-beta for the one, OpenAI-Beta for "
        f"the other, or set the base URL of the client to {CLAUDE_PREFIX} or {OPENAI_PREFIX}/v1 on this host.",
    )


class UnbuiltRoute(msgspec.Struct, frozen=True):
    """A method that a client library has and this server does not."""

    method: HttpMethod
    template: str
    sdk_method: str


class Found(msgspec.Struct, frozen=True):
    """A route and the parts of the path that it names."""

    route: AnyRoute | UnbuiltRoute
    params: dict[str, str]


class WrongMethod(msgspec.Struct, frozen=True):
    """The path is known, with these methods."""

    allowed: tuple[str, ...]


class _Node:
    """One segment of the known paths."""

    __slots__ = ("fixed", "named", "routes")

    def __init__(self) -> None:
        self.fixed: dict[str, _Node] = {}
        self.named: _Node | None = None
        self.routes: dict[str, tuple[AnyRoute | UnbuiltRoute, tuple[str, ...]]] = {}


class Router:
    """The routes of one face."""

    def __init__(self, routes: Iterable[AnyRoute | UnbuiltRoute]) -> None:
        self._root = _Node()
        for route in routes:
            self._add(route)

    def _add(self, route: AnyRoute | UnbuiltRoute) -> None:
        node = self._root
        names: list[str] = []
        for segment in route.template.strip("/").split("/"):
            if segment.startswith("{"):
                names.append(segment[1:-1])
                if node.named is None:
                    node.named = _Node()
                node = node.named
            else:
                node = node.fixed.setdefault(segment, _Node())
        assert route.method not in node.routes, f"{route.method} {route.template} is served twice"
        node.routes[route.method] = (route, tuple(names))

    def find(self, method: str, path: str) -> Found | WrongMethod | None:
        """The route for a path that is still percent-encoded; None when no method has it."""
        segments = path.strip("/").split("/")
        found = _walk(self._root, segments, 0, [])
        if found is None:
            return None
        node, values = found
        entry = node.routes.get(method)
        if entry is None:
            return WrongMethod(tuple(sorted(node.routes)))
        route, names = entry
        return Found(route, {name: unquote(value) for name, value in zip(names, values, strict=True)})


def _walk(node: _Node, segments: list[str], depth: int, values: list[str]) -> tuple[_Node, list[str]] | None:
    if depth == len(segments):
        return (node, values) if node.routes else None
    segment = segments[depth]
    fixed = node.fixed.get(segment)
    if fixed is not None:
        found = _walk(fixed, segments, depth + 1, values)
        if found is not None:
            return found
    if node.named is None or not segment:
        return None
    return _walk(node.named, segments, depth + 1, [*values, segment])
