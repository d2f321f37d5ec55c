"""Prometheus metrics: the names that dashboards of this ecosystem read, and octavo's own.

Receives what the engine reports and renders it from memory; never asks the engine. ``vllm:`` names,
labels and buckets are a contract with existing dashboards; what only octavo has is ``octavo:``.
Gauges mirror the last snapshot. Counters follow the highest value of one engine life (epoch) and start over
with the next, so that nothing makes them fall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from ..engine.api import Engine, EngineInfo, FinishReason
from ..engine.errors import EngineNotReadyError
from ..engine.stats import BLOCK_TIME_BUCKETS, EngineStats, RequestRecord
from .cumulative_histogram import CumulativeHistogram, TallyHistogram
from .exposition import CONTENT_TYPE, Exposition
from .http_metrics import HttpMetrics
from .metric_tables import (
    BLOCK_TIMES,
    COUNTERS,
    GAUGES,
    ITERATION_BUCKETS,
    ITL_BUCKETS,
    LABELLED_COUNTERS,
    LATENCY_BUCKETS,
    N_BUCKETS,
    PREEMPTION_BUCKETS,
    REJECTION_REASONS,
    TTFT_BUCKETS,
    Read,
    one_two_five,
)
from .responses_metrics import ResponseMetrics

ENGINE_INDEX = "0"
_LABELS = ("model_name", "engine")


class _RunningTotal:
    """A counter that follows a cumulative value of the engine.

    The value may dip, where it is the difference of two that are not counted at one moment.
    """

    def __init__(self, counter: Counter, read: Read) -> None:
        self._counter, self._read = counter, read
        self._seen = 0.0

    def update(self, stats: EngineStats) -> None:
        value = self._read(stats)
        if value > self._seen:
            self._counter.inc(value - self._seen)
            self._seen = value

    def restart(self) -> None:
        self._seen = 0.0


class Metrics:
    """The registry, and the :class:`~octavo.engine.stats.StatsSink` that fills it.

    Args:
        engine: Its limits and its restarts are told too.
        model_name: The label of every metric of the engine.
        on_stats: Is handed every snapshot too.

    Histograms whose buckets end at the model's window, and ``vllm:cache_config_info``, appear once
    the engine is ready.
    """

    content_type = CONTENT_TYPE

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        on_stats: Callable[[EngineStats], None] = lambda _: None,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._exposition = Exposition(self.registry)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.http = HttpMetrics(self.registry)
        self._engine = engine
        self._on_stats = on_stats
        self._values = (model_name, ENGINE_INDEX)
        labels = dict(zip(_LABELS, self._values, strict=True))
        self.responses = ResponseMetrics(self.registry, labels)
        self._epoch = 0
        self._gauges = [(self._gauge(name, text), read) for name, text, read in GAUGES]
        self._totals = [_RunningTotal(self._counter(n, text), read) for n, text, read in COUNTERS]
        self._block_times = [(self._block_time(n, text), read) for n, text, read in BLOCK_TIMES]
        self._timeouts = self._counter(
            "octavo:request_timeouts", "Requests ended because their time was up."
        )
        self._make_labelled()
        self._make_latencies()
        self._lengths: dict[str, Histogram] | None = None
        self._restarts = self._counter(
            "octavo:engine_restarts", "Engine processes started in place of one that had died."
        )
        self._num_restarts = 0
        self._num_tasks = Gauge(
            "octavo:event_loop_tasks",
            "Tasks of the front end: a few for itself, and some for each request.",
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The text exposition."""
        self._ready_lengths()
        num_restarts = self._engine.num_restarts
        self._restarts.inc(num_restarts - self._num_restarts)
        self._num_restarts = num_restarts
        with suppress(RuntimeError):  # no loop runs, so there are none
            self._num_tasks.set(len(asyncio.all_tasks()))
        return self._exposition.render()

    # StatsSink

    def record_step(self, stats: EngineStats, num_step_tokens: int) -> None:
        self._iteration_tokens.observe(num_step_tokens)
        self.record_stats(stats)

    def record_stats(self, stats: EngineStats) -> None:
        self._on_stats(stats)
        if stats.epoch != self._epoch:
            self._start_epoch(stats.epoch)
        for gauge, read in self._gauges:
            gauge.set(read(stats))
        for total in self._totals:
            total.update(stats)
        for histogram, read_totals in self._block_times:
            histogram.update(read_totals(stats))
        self._waiting_by_reason["capacity"].set(stats.num_waiting)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for total in self._totals:
            total.restart()
        for histogram, _ in self._block_times:
            histogram.restart()

    def refused(self, reason: str) -> None:
        """A request was refused because the limit that ``reason`` names is reached."""
        self._rejections[reason].inc()

    def timed_out(self) -> None:
        """A request's time was up before it had ended."""
        self._timeouts.inc()

    def record_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def record_inter_token(self, itl_s: float) -> None:
        self._itl.observe(itl_s)

    def record_finished(self, record: RequestRecord) -> None:
        self._success[record.finish_reason].inc()
        self._params_n.observe(record.n)
        self._num_preemptions.observe(record.num_preemptions)
        self._observe_times(record)
        lengths = self._ready_lengths()
        if lengths is not None:
            _observe_lengths(lengths, record)

    def _observe_times(self, record: RequestRecord) -> None:
        """A time that never came to be (aborted in the queue, say) is not observed."""
        self._e2e.observe(record.e2e_s)
        for histogram, value in (
            (self._queue, record.queue_s),
            (self._prefill, record.prefill_s),
            (self._decode, record.decode_s),
            (self._inference, record.inference_s),
        ):
            if value is not None:
                histogram.observe(value)
        num_intervals = record.max_num_generation_tokens - 1
        if record.decode_s is not None and num_intervals > 0:
            self._tpot.observe(record.decode_s / num_intervals)

    # Construction

    def _make_labelled(self) -> None:
        success = self._labelled_counter(
            "vllm:request_success", "Finished requests.", "finished_reason"
        )
        reasons = (*FinishReason, "repetition")
        self._success = {reason: success(str(reason)) for reason in reasons}
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused with 429, by the limit that was reached.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejections = {
            reason: rejections.labels(self._values[0], reason) for reason in REJECTION_REASONS
        }
        for name, text, label, values in LABELLED_COUNTERS:
            of = self._labelled_counter(name, text, label)
            self._totals += [_RunningTotal(of(value), read) for value, read in values]
        waiting = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by what they wait for.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
        self._waiting_by_reason = {
            reason: waiting.labels(*self._values, reason) for reason in ("capacity", "deferred")
        }

    def _make_latencies(self) -> None:
        make = self._histogram
        self._ttft = make(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self._itl = TallyHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens.",
            dict(zip(_LABELS, self._values, strict=True)),
            ITL_BUCKETS,
        )
        self.registry.register(self._itl)
        self._tpot = make(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between two tokens.",
            ITL_BUCKETS,
        )
        self._e2e = make(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS
        )
        self._queue = make(
            "vllm:request_queue_time_seconds", "Arrival to first scheduled.", LATENCY_BUCKETS
        )
        self._prefill = make(
            "vllm:request_prefill_time_seconds", "Scheduled to first token.", LATENCY_BUCKETS
        )
        self._decode = make(
            "vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS
        )
        self._inference = make(
            "vllm:request_inference_time_seconds", "Scheduled to last token.", LATENCY_BUCKETS
        )
        self._iteration_tokens = make(
            "vllm:iteration_tokens_total", "Tokens of one engine step.", ITERATION_BUCKETS
        )
        self._params_n = make("vllm:request_params_n", "Answers asked for.", N_BUCKETS)
        self._num_preemptions = make(
            "vllm:request_num_preemptions", "Preemptions of one request.", PREEMPTION_BUCKETS
        )

    def _ready_lengths(self) -> dict[str, Histogram] | None:
        """The histograms up to the model's window; ``None`` while it is not known."""
        if self._lengths is None:
            try:
                info = self._engine.info
            except EngineNotReadyError:
                return None
            self._lengths = self._make_lengths(info)
            self._make_cache_info(info)
        return self._lengths

    def _make_lengths(self, info: EngineInfo) -> dict[str, Histogram]:
        buckets = one_two_five(info.max_model_len)
        texts = {
            "prompt_tokens": "Prompt tokens of one request.",
            "generation_tokens": "Tokens generated for one request.",
            "max_num_generation_tokens": "Tokens of a request's longest answer.",
            "params_max_tokens": "Most tokens that one request could have had.",
            "prefill_kv_computed_tokens": "Prompt tokens of one request that were not cached.",
        }
        return {k: self._histogram(f"vllm:request_{k}", v, buckets) for k, v in texts.items()}

    def _make_cache_info(self, info: EngineInfo) -> None:
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "num_cpu_blocks": str(info.num_host_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(info.enable_prefix_caching),
            "kv_cache_memory_bytes": str(info.kv_cache_bytes),
            "kv_cache_size_tokens": str(info.num_kv_tokens),
            "kv_cache_max_concurrency": f"{info.kv_concurrency:.2f}",
            "engine": ENGINE_INDEX,
        }
        gauge = Gauge(
            "vllm:cache_config_info", "The KV cache.", tuple(labels), registry=self.registry
        )
        gauge.labels(**labels).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._values)

    def _block_time(self, name: str, text: str) -> CumulativeHistogram:
        labels = dict(zip(_LABELS, self._values, strict=True))
        histogram = CumulativeHistogram(name, text, labels, BLOCK_TIME_BUCKETS)
        self.registry.register(histogram)
        return histogram

    def _labelled_counter(self, name: str, text: str, label: str) -> Callable[[str], Counter]:
        counter = Counter(name, text, (*_LABELS, label), registry=self.registry)
        return lambda value: counter.labels(*self._values, value)


def _observe_lengths(lengths: dict[str, Histogram], record: RequestRecord) -> None:
    computed = record.num_prompt_tokens - record.num_cached_tokens
    lengths["prompt_tokens"].observe(record.num_prompt_tokens)
    lengths["generation_tokens"].observe(record.num_generation_tokens)
    lengths["max_num_generation_tokens"].observe(record.max_num_generation_tokens)
    lengths["prefill_kv_computed_tokens"].observe(computed)
    lengths["params_max_tokens"].observe(record.max_tokens)
