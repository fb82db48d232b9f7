"""Which name goes to which provider, and what the refusals tell the owner to set."""

import pytest

from perdure.models.anthropic import AnthropicModel
from perdure.models.local import LocalModel
from perdure.models.router import Router, RouterSettings
from perdure.models.scripted import ScriptedModel
from perdure.ports.model import ModelFailed, ModelRequest, ModelUnknown
from perdure.testing.model_server import Gate, ModelServer, Reply, Text


@pytest.mark.parametrize(
    ("model", "adapter", "name"),
    [
        ("claude-sonnet-5", AnthropicModel, "claude-sonnet-5"),
        ("anthropic/claude-sonnet-5", AnthropicModel, "claude-sonnet-5"),
        ("local/smollm2", LocalModel, "smollm2"),
        ("scripted/demo", ScriptedModel, "demo"),
        ("scripted/a/b", ScriptedModel, "a/b"),
    ],
)
async def test_each_prefix_has_its_provider(model: str, adapter: type, name: str) -> None:
    router = Router(RouterSettings(anthropic_api_key="sk-test"))
    router.check(model)
    resolved, own_name = router.resolve(model)
    assert isinstance(resolved, adapter)
    assert own_name == name
    await router.close()


async def test_a_provider_is_made_once_until_it_is_closed() -> None:
    router = Router(RouterSettings(anthropic_api_key="sk-test"))
    first, _ = router.resolve("claude-x")
    assert router.resolve("anthropic/claude-y")[0] is first
    await router.close()
    assert router.resolve("claude-x")[0] is not first
    await router.close()


async def test_a_silent_connection_is_given_up_when_the_settings_say(server: ModelServer) -> None:
    """So a time of silence longer than the usual one is waited out, and a shorter one too."""
    settings = RouterSettings(anthropic_api_key="sk-test", anthropic_base_url=server.base_url, silence_s=0.05)
    router = Router(settings)
    server.enqueue(Reply(Text("never"), gate=Gate()))
    model, name = router.resolve("claude-x")
    request = ModelRequest(
        model=name,
        system=None,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        tools=[],
        max_tokens=64,
    )
    with pytest.raises(ModelFailed, match="can't be reached"):
        async for _ in model.stream(request):
            pass
    await router.close()


@pytest.mark.parametrize("settings", [RouterSettings(), RouterSettings(anthropic_api_key="", anthropic_base_url="")])
def test_without_a_key_the_refusal_names_the_variables(settings: RouterSettings) -> None:
    for model in ("claude-x", "anthropic/claude-x"):
        with pytest.raises(ModelUnknown, match=r"ANTHROPIC_API_KEY.*PERDURE_ANTHROPIC_BASE_URL"):
            Router(settings).check(model)


@pytest.mark.parametrize("model", ["gpt-6", "o1", "o4-mini", "codex-1", "openai/whatever", "chatgpt-x"])
def test_openai_is_said_to_be_not_built_yet(model: str) -> None:
    with pytest.raises(ModelUnknown, match="openai, which is not built yet"):
        Router(RouterSettings()).resolve(model)


@pytest.mark.parametrize(
    "model", ["", "llama", "local/", "local/other", "scripted/", "scripted", "anthropic/", "claude/x", "/x", "opus"]
)
def test_other_names_are_unknown_and_the_known_ones_are_listed(model: str) -> None:
    with pytest.raises(ModelUnknown, match="local/smollm2 and scripted/NAME"):
        Router(RouterSettings(anthropic_api_key="sk-test")).check(model)


async def test_an_own_endpoint_needs_no_key(server: ModelServer) -> None:
    server.enqueue(Reply(Text("x")))
    router = Router(RouterSettings(anthropic_base_url=server.base_url))
    model, name = router.resolve("claude-x")
    request = ModelRequest(
        model=name, system=None, messages=[{"role": "user", "content": "hi"}], tools=[], max_tokens=5
    )
    assert [event async for event in model.stream(request)]
    assert server.requests[0].refused is None
    await router.close()


@pytest.mark.parametrize(
    ("key", "model", "warmed"),
    [("sk-test", None, 1), (None, None, 0), (None, "claude-x", 0), ("sk-test", "llama", 0), ("sk-test", "claude-x", 1)],
)
async def test_what_can_be_called_is_made_ready(
    monkeypatch: pytest.MonkeyPatch, key: str | None, model: str | None, warmed: int
) -> None:
    calls: list[AnthropicModel] = []

    async def warm(adapter: AnthropicModel) -> None:
        calls.append(adapter)

    monkeypatch.setattr(AnthropicModel, "warm", warm)
    router = Router(RouterSettings(anthropic_api_key=key))
    await router.warm(model)
    assert len(calls) == warmed
    await router.close()
