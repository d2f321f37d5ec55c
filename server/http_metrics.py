"""Counts and times HTTP requests. Labels are route templates, never what a client typed."""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .paths import route_path
from .tenants import tenant_of

logger = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_UNCOUNTED = frozenset({"/health", "/ping", "/ready", "/startup", "/version", "/load", "/metrics"})


class HttpMetrics:
    """``http_requests_total`` and ``http_request_duration_seconds``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "HTTP requests, by route, method and class of status.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Time from a request's first byte to its answer's last.",
            ("handler", "method"),
            buckets=(0.1, 0.5, 1.0),
            registry=registry,
        )

    def observe(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """Count one request; an unknown method or path shares one label with its like."""
        method = method if method in _METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(duration_s)


class HttpMetricsMiddleware:
    """Feeds :class:`HttpMetrics`; probes and scrapes are not counted.

    Args:
        is_logged: Log a line for each POST request too.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, *, is_logged: bool = False) -> None:
        self._app = app
        self._metrics = metrics
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; observe it at its end, however it ends. One without an answer counts as a 500."""
        if scope["type"] != "http" or route_path(scope) in _UNCOUNTED:
            await self._app(scope, receive, send)
            return
        status, start = 500, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            took_s = time.perf_counter() - start
            self._metrics.observe(handler, scope["method"], status, took_s)
            if self._is_logged and scope["method"] == "POST":
                tenant = tenant_of(scope)
                whose = "nobody" if tenant is None else tenant.name
                logger.info("POST %s %d in %.0f ms for %s", handler, status, took_s * 1e3, whose)
