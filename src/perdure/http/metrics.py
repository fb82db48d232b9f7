"""Numbers for Prometheus. Labels come from fixed sets: a route's template, never a path; a class of status, never an id."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from perdure import telemetry

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
UNROUTED: Final = "(none)"


class HttpMetrics:
    """One registry a process, and what the HTTP layer counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "perdure_http_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self.latency_s = Histogram(
            "perdure_http_request_seconds",
            "From the first byte of a request to the last of its answer, streams left out.",
            ("method", "route"),
            registry=self.registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.admissions = Counter(
            "perdure_admissions",
            "Requests that are submitted once, by what became of them.",
            ("route", "outcome"),
            registry=self.registry,
        )
        self.open_streams = Gauge("perdure_open_streams", "Streams open now.", registry=self.registry)
        self.revoked_streams = Counter(
            "perdure_streams_revoked", "Streams closed because their key was revoked.", registry=self.registry
        )

        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def answered(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """One request is done. Streams have no duration that means anything."""
        found = self._children.get((method, route, status))
        if found is None:
            count = self.requests.labels(method, route, f"{status // 100}xx")
            found = self._children[method, route, status] = (count, self.latency_s.labels(method, route))
        found[0].inc()
        if seconds is not None:
            found[1].observe(seconds)

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Show a number that another part keeps: `read` is called at each scrape and must not wait."""
        Gauge(name, documentation, registry=self.registry).set_function(read)

    def page(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry) + generate_latest(telemetry.REGISTRY)
