"""Settings: what an operator may choose, from flags, the environment and `perdure.toml`, in that order. Unknown keys are refused."""

import contextlib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec

BusName: TypeAlias = Literal["auto", "inprocess", "notify"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

DEFAULT_PORT: Final = 8700
DEFAULT_DATA: Final = ".perdure"
DEFAULT_FILE: Final = "perdure.toml"
ENV_PREFIX: Final = "PERDURE_"
PROVIDER_KEY_VARIABLE: Final = "ANTHROPIC_API_KEY"

OTHER_VARIABLES: Final = ("PERDURE_URL", "PERDURE_API_KEY", "PERDURE_CRASH_AT", "PERDURE_RULES_OUT")
"""Of the client verbs, of crash points and of test runs."""

OTHER_PREFIXES: Final = ("PERDURE_LONG", "PERDURE_BENCH")
"""Of test runs and of the benchmark."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's settings. What each may be stands in `RULES`; a limit that is not here is a constant with its reason beside its use."""

    data: Path = Path(DEFAULT_DATA)
    """Where the embedded PostgreSQL, workspaces and credentials live."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0 takes a free one."""
    database_url: str | None = None
    """A PostgreSQL from 15 on; without one an embedded PostgreSQL is started in `data`."""
    engine: Literal["embedded"] = "embedded"
    bus: BusName = "auto"
    concurrency: int = 64
    """Turns in flight in one process."""
    anthropic_api_key: str | None = None
    anthropic_base_url: str | None = None
    warm_model: str | None = None
    """A model whose provider is made ready while a worker starts, so that its first call waits for nothing. By default those that have a
    key or an address."""
    model_stall_ms: int = 120_000
    """A provider that sends nothing for this long has lost the call."""
    unsafe_no_sandbox: bool = False
    """Run tools without a sandbox when none can hold on this host. Whoever reaches the API then owns this host."""
    log_json: bool = False
    log_level: LogLevel = "info"


def make_data_directory(data: Path) -> None:
    """Make the data directory if need be, for this user alone. One that is there already is left as its owner made it."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)


class BadSetting(Exception):
    """A setting can't be used. The message names it, where it came from, and the rule."""


# ------------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting may be: in words that follow `it must be`, and as a test of a value that has the right type already."""

    text: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int, why: str) -> Rule:
    return Rule(f"a whole number from {least} to {most} ({why})", lambda value: least <= value <= most)


def _one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}" if len(names) > 1 else f"{', '.join(names)}, the only one", lambda _: True)


def _is_host(host: str) -> bool:
    return bool(host) and host.isprintable() and not set(host) & set(" /@[]")


def _is_database_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    ports = [address.rpartition("]")[2].partition(":")[2] for address in parts.netloc.rpartition("@")[2].split(",")]
    return (
        parts.scheme in ("postgresql", "postgres")
        and url.startswith(f"{parts.scheme}://")
        and all(not port or port.isdecimal() for port in ports)
    )


URL_CHARS_MAX: Final = 2_000


def is_web_url(url: str) -> bool:
    """Whether requests can be sent there."""
    try:
        parts = urlsplit(url)
        is_plain = url.isprintable() and " " not in url and len(url) <= URL_CHARS_MAX
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_header_value(key: str) -> bool:
    """Whether a key can be sent as a header."""
    return key.isascii() and key.isprintable() and " " not in key


_FLAG: Final = Rule("true or false", lambda _: True)

RULES: Final[Mapping[str, Rule]] = {
    "data": Rule("the path of a directory", lambda path: "\0" not in str(path)),
    "host": Rule("a name or an address of this host, without scheme and port", _is_host),
    "port": _whole(0, 65_535, "TCP has no others; 0 takes a free one"),
    "database_url": Rule("of the form postgresql://USER:PASSWORD@HOST:PORT/DATABASE", _is_database_url),
    "engine": _one_of("embedded"),
    "bus": _one_of("auto", "inprocess", "notify"),
    "concurrency": _whole(1, 10_000, "with none no turn runs; each holds a connection, of which a process has no more"),
    "anthropic_api_key": Rule("printable ASCII without blanks, because it is sent as a header", is_header_value),
    "anthropic_base_url": Rule("of the form https://HOST or http://HOST:PORT", is_web_url),
    "warm_model": Rule("the name of a model, like local/smollm2", lambda name: bool(name.strip())),
    "model_stall_ms": _whole(
        1_000,
        3_600_000,
        "milliseconds; a healthy provider is silent for a second, and none that is for an hour comes back",
    ),
    "unsafe_no_sandbox": _FLAG,
    "log_json": _FLAG,
    "log_level": _one_of("debug", "info", "warning", "error"),
}
"""What each setting may be, with the reason where it is not plain."""

SECRETS: Final = frozenset({"database_url", "anthropic_api_key"})
"""Never repeated in a message: a URL may have a password in it."""

_TYPES: Final[Mapping[str, Any]] = {field.name: field.type for field in msgspec.structs.fields(Settings)}


# ----------------------------------------------------------------------------------------------------------------- loading


class _Given(NamedTuple):
    value: Any
    source: str


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, *, file: Path | None = None) -> Settings:
    """Settings from flags (None means not given), then the environment, then the file, then the defaults. Raises `BadSetting`.

    In the environment and the file an empty text counts as not given. The provider's key is also taken from `ANTHROPIC_API_KEY` when
    nothing else names one; its base URL only from `PERDURE_ANTHROPIC_BASE_URL`, because `ANTHROPIC_BASE_URL` points clients at us.
    """
    given = {name: g for name, g in _from_file(file).items() if g.value != ""}
    for name in _TYPES:
        variable = ENV_PREFIX + name.upper()
        if environ.get(variable) and variable not in foreign_variables(environ):
            given[name] = _Given(environ[variable], f"the environment variable {variable}")
    if "anthropic_api_key" not in given and environ.get(PROVIDER_KEY_VARIABLE):
        source = f"the environment variable {PROVIDER_KEY_VARIABLE}"
        given["anthropic_api_key"] = _Given(environ[PROVIDER_KEY_VARIABLE], source)
    for name, value in flags.items():
        if value is not None:
            given[name] = _Given(value, f"the flag --{name.replace('_', '-')}")
    return Settings(**{name: _checked(name, *one) for name, one in given.items()})


def foreign_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables named like our settings that Kubernetes makes for a service named `perdure`: the address of that service, not a port."""
    variable = f"{ENV_PREFIX}PORT"
    return [variable] if environ.get(variable, "").startswith(("tcp://", "udp://", "sctp://")) else []


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables of our prefix that nothing reads: most likely misspelt, or another program's."""
    known = {ENV_PREFIX + name.upper() for name in _TYPES}.union(OTHER_VARIABLES)
    ours = (name for name in environ if name.startswith(ENV_PREFIX) and not name.startswith(OTHER_PREFIXES))
    return sorted([*(name for name in ours if name not in known), *foreign_variables(environ)])


def _checked(name: str, value: Any, source: str) -> Any:
    """The value in its type, within its rule."""
    rule = RULES[name]
    try:
        converted = msgspec.convert(value, _TYPES[name], strict=False, dec_hook=_hook)
    except msgspec.ValidationError:
        converted = None
    if converted is None or not rule.holds(converted):
        # A secret is not repeated.
        told = "used as it is" if name in SECRETS else repr(str(value) if isinstance(value, Path) else value)
        raise BadSetting(f"The setting {name} can't be {told} (from {source}): it must be {rule.text}.")
    return converted


def _from_file(file: Path | None) -> dict[str, _Given]:
    path = file or Path(DEFAULT_FILE)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file is not None:
            raise BadSetting(f"The settings file {str(path)!r} does not exist.") from None
        return {}
    except OSError as error:
        raise BadSetting(f"The settings file {str(path)!r} can't be read: {error.strerror}.") from None
    except ValueError as error:
        # Broken TOML, or no UTF-8.
        raise BadSetting(f"The settings file {str(path)!r} is not valid TOML: {error}.") from None
    for name in table:
        if name not in _TYPES:
            raise BadSetting(
                f"The settings file {str(path)!r} has the key {name!r}, which is no setting. "
                f"The settings are {', '.join(_TYPES)}."
            )
    return {name: _Given(value, f"the file {str(path)!r}") for name, value in table.items()}


def _hook(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        with contextlib.suppress(RuntimeError):
            return Path(value).expanduser()
        raise ValueError("its ~ names no home directory that is known here")
    raise TypeError(f"a setting of type {kind.__name__} is not supported")
