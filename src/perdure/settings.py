"""Settings: what an operator may choose, from flags, the environment and `perdure.toml`, in that order. Unknown keys are refused."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

BusName: TypeAlias = Literal["auto", "inprocess", "notify"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

DEFAULT_PORT: Final = 8700
DEFAULT_DATA: Final = ".perdure"
ENV_PREFIX: Final = "PERDURE_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's settings. Every limit that is not here is a constant with its reason beside its use."""

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


class BadSetting(Exception):
    """A setting can't be used. The message names it, where it came from, and the rule."""


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, *, file: Path | None = None) -> Settings:
    """Settings from flags (None means not given), then the environment, then the file, then the defaults.

    The provider's key is also taken from `ANTHROPIC_API_KEY`; its base URL only from `PERDURE_ANTHROPIC_BASE_URL`, because
    `ANTHROPIC_BASE_URL` points clients at us.
    """
    merged: dict[str, Any] = dict(_from_file(file))
    for name in Settings.__struct_fields__:
        value = environ.get(ENV_PREFIX + name.upper())
        if value:
            merged[name] = value
    if not merged.get("anthropic_api_key") and environ.get("ANTHROPIC_API_KEY"):
        merged["anthropic_api_key"] = environ["ANTHROPIC_API_KEY"]
    merged |= {k: v for k, v in flags.items() if v is not None}
    try:
        return msgspec.convert(merged, Settings, strict=False, dec_hook=_hook)
    except msgspec.ValidationError as error:
        raise BadSetting(
            f"A setting can't be used: {error}. Look at the flags, PERDURE_* in the environment, and perdure.toml."
        ) from None


def _from_file(file: Path | None) -> dict[str, Any]:
    path = file or Path("perdure.toml")
    if not path.exists():
        if file is not None:
            raise BadSetting(f"The settings file {str(path)!r} does not exist.")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadSetting(f"{str(path)!r} is not valid TOML: {error}.") from None


def _hook(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"a setting of type {kind.__name__} is not supported")
