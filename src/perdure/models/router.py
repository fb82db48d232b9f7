"""Which provider serves a model: by the prefix of its name. Adapters are made on first use, one for each provider."""

import contextlib
import re
from typing import Final, Literal, TypeAlias

import msgspec

from perdure.models.anthropic import AnthropicModel
from perdure.models.local import LOCAL_MODEL, LocalModel
from perdure.models.scripted import ScriptedModel
from perdure.ports.model import Model, ModelUnknown

Provider: TypeAlias = Literal["anthropic", "local", "scripted"]

# An endpoint of one's own may need no key, but the SDK refuses to send none.
PLACEHOLDER_KEY: Final = "no-key-configured"

_OPENAI = re.compile(r"gpt.*|chatgpt.*|o\d.*|codex.*|openai/.*", re.DOTALL)


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the providers need. An empty text counts as absent."""

    anthropic_api_key: str | None = None
    anthropic_base_url: str | None = None
    silence_s: float = 120.0
    """How long a provider's connection may be silent before it is given up: a little longer than the turn waits for it."""


class Router:
    """The `ModelRouter` of one process."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._adapters: dict[Provider, Model] = {}

    def check(self, model: str) -> None:
        """Raise `ModelUnknown` unless `model` could be called now."""
        self._route(model)

    def resolve(self, model: str) -> tuple[Model, str]:
        """The adapter and its own name of the model."""
        provider, name = self._route(model)
        adapter = self._adapters.get(provider)
        if adapter is None:
            adapter = self._adapters[provider] = self._make(provider)
        return adapter, name

    async def warm(self, model: str | None = None) -> None:
        """Prepare the provider of a model for its first call; without one, the providers that settings were given for.

        One that is not known is left alone.
        """
        with contextlib.suppress(ModelUnknown):
            adapter, _ = self.resolve(model or "anthropic/any")
            await adapter.warm()

    async def close(self) -> None:
        """Close every adapter that was made. Repeatable."""
        while self._adapters:
            _, adapter = self._adapters.popitem()
            await adapter.close()

    def _route(self, model: str) -> tuple[Provider, str]:
        prefix, slash, name = model.partition("/")
        if model.startswith("claude") and not slash:
            return self._anthropic(model, model)
        if prefix == "anthropic" and name:
            return self._anthropic(model, name)
        if prefix == "scripted" and name:
            return "scripted", name
        if prefix == "local" and name == LOCAL_MODEL:
            return "local", name
        if _OPENAI.fullmatch(model):
            raise ModelUnknown(f"The model {model!r} belongs to the provider openai, which is not built yet. {_KNOWN}")
        raise ModelUnknown(f"No provider serves the model {model!r}. {_KNOWN}")

    def _anthropic(self, model: str, name: str) -> tuple[Provider, str]:
        if self._settings.anthropic_api_key or self._settings.anthropic_base_url:
            return "anthropic", name
        raise ModelUnknown(
            f"The model {model!r} needs the provider anthropic, which has no key here: set ANTHROPIC_API_KEY "
            "(PERDURE_ANTHROPIC_BASE_URL may point elsewhere) and start again."
        )

    def _make(self, provider: Provider) -> Model:
        match provider:
            case "anthropic":
                key = self._settings.anthropic_api_key or PLACEHOLDER_KEY
                return AnthropicModel(
                    key, self._settings.anthropic_base_url or None, silence_s=self._settings.silence_s
                )
            case "local":
                return LocalModel(silence_s=self._settings.silence_s)
            case "scripted":
                return ScriptedModel()


_KNOWN: Final = f"Known are claude..., anthropic/NAME, local/{LOCAL_MODEL} and scripted/NAME."
