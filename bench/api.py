"""A client of the public API for what is not measured: setting sessions up, and reading back what was acknowledged."""

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

VERSION_HEADERS: Final = {"anthropic-version": "2023-06-01", "anthropic-beta": "managed-agents-2026-04-01"}
TOOL_SET: Final = "agent_toolset_20260401"
MAKERS: Final = 4
"""Sessions made at the same time while a benchmark is set up."""

PAGE: Final = 1000


class ApiFailed(Exception):
    """The server did not answer with 2xx."""


class Api:
    """One connection; not for two threads."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = 60) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.url = url
        self.api_key = api_key
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        self._headers = {"x-api-key": api_key, "content-type": "application/json", **VERSION_HEADERS}

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The answer's JSON. Raises `ApiFailed`, or OSError and HTTPException when the connection breaks."""
        raw = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, raw, {**self._headers, **(headers or {})})
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        if not 200 <= answer.status < 300:
            raise ApiFailed(f"{method} {path}: {answer.status} {content[:300]!r}")
        return json.loads(content)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def make_agent(self, model: str, *, tools: bool = False) -> dict[str, str]:
        """An agent and an environment; what a session is made from."""
        environment = self.call("POST", "/v1/environments", {"name": "bench", "config": {"type": "cloud"}})
        given: dict[str, Any] = {"name": "bench", "model": model}
        if tools:
            allowed = {"permission_policy": {"type": "always_allow"}}
            given["tools"] = [{"type": TOOL_SET, "default_config": allowed}]
        agent = self.call("POST", "/v1/agents", given)
        return {"agent": agent["id"], "environment_id": environment["id"]}

    def make_sessions(self, parts: dict[str, str], count: int) -> list[str]:
        """So many new sessions."""

        def make(share: int) -> list[str]:
            own = Api(self.url, self.api_key)
            made = [own.call("POST", "/v1/sessions", parts)["id"] for _ in range(share)]
            own.close()
            return made

        shares = [count // MAKERS + (n < count % MAKERS) for n in range(MAKERS)]
        with ThreadPoolExecutor(MAKERS) as pool:
            return [session for made in pool.map(make, shares) for session in made]

    def events(self, session: str, query: str = "") -> Iterator[dict[str, Any]]:
        """All events of a session, in their order."""
        page = ""
        while True:
            answer = self.call("GET", f"/v1/sessions/{session}/events?limit={PAGE}{query}{page}")
            yield from answer["data"]
            if not answer["next_page"]:
                return
            page = f"&page={answer['next_page']}"


def message(text: str) -> dict[str, Any]:
    """The body that sends one message."""
    return {"events": [{"type": "user.message", "content": [{"type": "text", "text": text}]}]}
