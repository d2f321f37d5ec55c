"""Prometheus histograms: of running totals that are reported from elsewhere, and of what comes with every token."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..engine.stats import HistogramCounts


class CumulativeHistogram(Collector):
    """Never falls: with the next engine life its totals come on top.

    Args:
        name, text: of the metric.
        labels: names and values.
        bounds: upper bounds of the buckets; one more, without a bound, follows.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*bounds, math.inf)
        ]
        self._past = [0] * len(self._bounds)
        self._past_s = 0.0
        self._current = HistogramCounts()

    def update(self, totals: HistogramCounts) -> None:
        """Take over the totals of the present engine life."""
        self._current = totals

    def restart(self) -> None:
        """A new engine life begins; its totals start at zero."""
        self._past = [a + b for a, b in zip(self._past, self._current.counts, strict=True)]
        self._past_s += self._current.total_s
        self._current = HistogramCounts()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """See :class:`prometheus_client.registry.Collector`."""
        buckets: list[tuple[str, float]] = []
        num_so_far = 0
        for bound, past, current in zip(
            self._bounds, self._past, self._current.counts, strict=True
        ):
            num_so_far += past + current
            buckets.append((bound, num_so_far))
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        total_s = self._past_s + self._current.total_s
        family.add_metric(tuple(self._labels.values()), buckets, total_s)
        yield family


class TallyHistogram(Collector):
    """Counts observations itself, for one thread, without a lock and a search through all bounds.

    Args: as of :class:`CumulativeHistogram`.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float]
    ) -> None:
        self._shown = CumulativeHistogram(name, text, labels, bounds)
        self._upper = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._upper, value)] += 1
        self._total += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """See :class:`prometheus_client.registry.Collector`."""
        self._shown.update(HistogramCounts(tuple(self._counts), self._total))
        return self._shown.collect()
