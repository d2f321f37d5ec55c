"""How full the store of responses is."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

STORE_REASON = "response_store"
"""Why a response in the background is refused, in the metric of refusals."""


class ResponseMetrics:
    """Gauges of the store and a counter of what it had no room for.

    Args:
        registry: Where they are added.
        labels: Names and values, the same for each.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, tuple(labels), registry=registry).labels(**labels)

        self._stored = gauge("octavo:stored_responses", "Responses that have ended and are kept.")
        self._bytes = gauge(
            "octavo:stored_response_bytes",
            "Bytes of kept responses and of those in the background, when one last began or ended.",
        )
        self._background = gauge(
            "octavo:background_responses", "Responses that are being generated in the background."
        )
        self._evictions = Counter(
            "octavo:stored_response_evictions",
            "Kept responses that were forgotten for want of room.",
            tuple(labels),
            registry=registry,
        ).labels(**labels)

    def stored(self, num_ended: int, num_bytes: int, num_running: int) -> None:
        """What the store holds."""
        self._stored.set(num_ended)
        self._bytes.set(num_bytes)
        self._background.set(num_running)

    def evicted(self) -> None:
        """One response less."""
        self._evictions.inc()
