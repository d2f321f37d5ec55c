"""Renders a registry in Prometheus' text format, byte for byte as the client library does.

Scrapers may come every 50 ms and rendering holds the event loop, so what never changes of a line, its
name and escaped labels, is made once. That store is bounded because no label takes a client's value.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """The text of one registry of counters, gauges and histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._heads: dict[tuple[str, ...], str] = {}

    def render(self) -> bytes:
        """The current values."""
        parts: list[str] = []
        for metric in self._registry.collect():
            parts.append(_preamble(metric))
            for sample in metric.samples:
                key = (sample.name, *sample.labels.values())
                head = self._heads.get(key)
                if head is None:
                    head = self._heads[key] = _head(sample)
                parts.append(f"{head} {_number(sample.value)}\n")
        return "".join(parts).encode()


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _preamble(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.type}\n"


def _head(sample: Sample) -> str:
    if not sample.labels:
        return sample.name
    pairs = (f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
