"""Whether what the server sends is what the official SDK's types say: every field known, every required one there."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

Json: TypeAlias = Mapping[str, Any]
Model: TypeAlias = Any
"""A pydantic class of the SDK. The SDK is imported when it is needed: shipped code and the test kit know it from outside only."""

EXTENSIONS: Final = {"session.error": frozenset({"flushed_event_ids"})}
"""Fields that this server adds, and its documentation names (MA-B4.4)."""

OPAQUE: Final = frozenset({"input", "input_schema", "metadata"})
"""What clients and models fill as they like."""

_UNIONS: Final = ("BetaManagedAgentsStreamSessionEvents", "BetaManagedAgentsSessionEvent")


def _members(annotation: Any) -> list[Model]:
    """The classes of a union, through annotations and nesting."""
    if get_origin(annotation) is Union or str(get_origin(annotation)) == "<class 'types.UnionType'>":
        return [m for part in get_args(annotation) for m in _members(part)]
    if hasattr(annotation, "__metadata__"):
        return _members(annotation.__origin__)
    return [annotation] if hasattr(annotation, "model_fields") else []


def _type_of(model: Model) -> str | None:
    field = model.model_fields.get("type")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    return str(get_args(field.annotation)[0])


def event_classes() -> dict[str, Model]:
    """The SDK's class for each event type."""
    module = importlib.import_module("anthropic.types.beta.sessions")
    found: dict[str, Model] = {}
    for name in _UNIONS:
        for model in _members(getattr(module, name)):
            kind = _type_of(model)
            if kind is not None:
                found[kind] = model
    return found


class WireCheck:
    """Checks events and objects against the SDK."""

    def __init__(self) -> None:
        self._events = event_classes()

    def faults_of_events(self, events: Iterable[Json]) -> list[str]:
        """What the SDK's types do not have, or miss."""
        faults: list[str] = []
        for event in events:
            kind = str(event["type"])
            model = self._events.get(kind)
            if model is None:
                faults.append(f"{kind}: the SDK has no such event")
                continue
            known = EXTENSIONS.get(kind, frozenset())
            faults += self.faults_of(model, {k: v for k, v in event.items() if k not in known}, kind)
        return faults

    def faults_of_session(self, session: Json) -> list[str]:
        """A `session` against the SDK."""
        model = importlib.import_module("anthropic.types.beta").BetaManagedAgentsSession
        return self.faults_of(model, session, "session")

    def faults_of(self, model: Model, value: Json, path: str) -> list[str]:
        """One object against a class of the SDK, and what it holds against the classes below."""
        names = {f.alias or n: f for n, f in model.model_fields.items()}
        faults = [f"{path}.{name}: not a field of {model.__name__}" for name in value if name not in names]
        faults += [f"{path}.{n}: missing" for n, f in names.items() if f.is_required() and n not in value]
        for name, field in names.items():
            if name in value and name not in OPAQUE:
                faults += self._field(field.annotation, value[name], f"{path}.{name}")
        return faults

    def _field(self, annotation: Any, value: Any, path: str) -> list[str]:
        if hasattr(annotation, "__metadata__"):
            annotation = annotation.__origin__
        arguments = get_args(annotation)
        if value is None:
            optional = type(None) in arguments or annotation in (type(None), Any, object)
            return [] if optional else [f"{path}: must not be null"]
        if isinstance(value, list):
            inner = next((get_args(a)[0] for a in (annotation, *arguments) if get_origin(a) is list), None)
            items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
            return [f for n, v in enumerate(items) for f in self._field(inner, v, f"{path}.{n}")] if inner else []
        if isinstance(value, dict):
            return self._object(annotation, value, path)  # pyright: ignore[reportUnknownArgumentType]
        return self._scalar(annotation, value, path)

    def _object(self, annotation: Any, value: dict[str, Any], path: str) -> list[str]:
        models = _members(annotation)
        if not models:
            return []
        typed = [m for m in models if _type_of(m) == value.get("type")] or models
        found = [self.faults_of(m, value, path) for m in typed]
        return min(found, key=len)

    def _scalar(self, annotation: Any, value: Any, path: str) -> list[str]:
        literals = [v for a in (annotation, *get_args(annotation)) if get_origin(a) is Literal for v in get_args(a)]
        plain = str in (annotation, *get_args(annotation))
        if literals and isinstance(value, str) and not plain and value not in literals:
            return [f"{path}: {value!r} is none of {literals}"]
        return []
