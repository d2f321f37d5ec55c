"""The text exposition: names, labels, buckets and what is counted when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.api import FinishReason
from octavo.engine.stats import EngineStats, HistogramCounts, RequestRecord
from octavo.server.metrics import Metrics

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

LABELS = {"model_name": "tiny", "engine": "0"}
HISTOGRAMS = {
    "vllm:request_prompt_tokens": "1 2 5 10 20 50",
    "vllm:request_generation_tokens": "1 2 5 10 20 50",
    "vllm:request_max_num_generation_tokens": "1 2 5 10 20 50",
    "vllm:request_params_max_tokens": "1 2 5 10 20 50",
    "vllm:request_prefill_kv_computed_tokens": "1 2 5 10 20 50",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:request_num_preemptions": "1 2 3 4 5 10 20",
    "vllm:time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 "
    "10 20 40 80 160 640 2560",
    "vllm:inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 "
    "20 40 80",
    "vllm:request_time_per_output_token_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 "
    "5 7.5 10 20 40 80",
} | dict.fromkeys(
    (
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
    ),
    ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
)
HISTOGRAMS |= dict.fromkeys(
    ("vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds"),
    ".001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 20 30 60 120 300 600 1200 1800",
)
LABELLED = {
    "vllm:prompt_tokens_by_source_total": (
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "vllm:prompt_tokens_cached_by_source_total": (
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "octavo:prefix_cache_hit_tokens_total": ("source", ("device", "host", "inside_block")),
    "octavo:preemptions_total": ("kind", ("recompute", "swap")),
    "octavo:kv_blocks_swapped_total": ("direction", ("out", "in")),
    "octavo:kv_swapped_bytes_total": ("direction", ("out", "in")),
}
GAUGES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("octavo:kv_blocks_total", "octavo:kv_blocks_used", "octavo:kv_blocks_free"),
    *("octavo:kv_slots_used", "octavo:kv_waste_ratio", "octavo:kv_blocks_cached"),
    *("octavo:kv_blocks_shared", "octavo:kv_blocks_saved_by_sharing"),
    *("octavo:kv_host_blocks_total", "octavo:kv_host_blocks_used"),
}
COUNTERS = {
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:prompt_tokens_cached_total", "vllm:corrupted_requests_total"),
    *("octavo:kv_slot_steps_allocated_total", "octavo:kv_slot_steps_used_total"),
    *("octavo:copy_on_write_total", "octavo:prefix_cache_evictions_total"),
    *("octavo:steps_total", "octavo:step_tokens_total", "octavo:engine_busy_seconds_total"),
}


class Scrape:
    """One exposition, parsed."""

    def __init__(self, text: bytes) -> None:
        families = list(text_string_to_metric_families(text.decode()))
        self.types = {family.name: family.type for family in families}
        self.samples = [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        wanted = labels if name.startswith(("http_", "process_")) else LABELS | labels
        found = [s.value for s in self.samples if s.name == name and s.labels == wanted]
        assert len(found) == 1, f"{name}: {len(found)} samples"
        return found[0]


@pytest.fixture
def metrics(engine: FakeEngine) -> Metrics:
    return Metrics(engine, "tiny")


def scrape(metrics: Metrics) -> Scrape:
    return Scrape(metrics.render())


def test_names_labels_and_buckets(metrics: Metrics) -> None:
    seen = scrape(metrics)
    for name in GAUGES:
        assert seen.types[name] == "gauge"
        assert seen.value(name) == 0
    for name in COUNTERS:
        assert seen.types[name.removesuffix("_total")] == "counter"
        assert seen.value(name) == 0
    for name, buckets in HISTOGRAMS.items():
        assert seen.types[name] == "histogram"
        bounds = [s.labels["le"] for s in seen.samples if s.name == f"{name}_bucket"]
        assert [float(b) for b in bounds] == [*map(float, buckets.split()), float("inf")]
        assert seen.value(f"{name}_count") == 0
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert seen.value("vllm:request_success_total", finished_reason=reason) == 0
    for name, (label, values) in LABELLED.items():
        for value in values:
            assert seen.value(name, **{label: value}) == 0
    for reason in ("capacity", "deferred"):
        assert seen.value("vllm:num_requests_waiting_by_reason", reason=reason) == 0


def test_rendering_is_that_of_the_client_library(engine: FakeEngine) -> None:
    metrics = Metrics(engine, 'a "quoted\\" name\n')
    metrics.http.observe("/v1/models", "GET", 200, 0.25)
    metrics.record_first_token(float("inf"))
    metrics.record_stats(EngineStats(block_lifetimes=HistogramCounts((1,) * 22, 7.5)))
    for _ in range(2):
        ours = metrics.render().splitlines()
        theirs = generate_latest(metrics.registry).splitlines()
        moving = (b"process_", b"python_gc_")
        assert [line for line in ours if not line.startswith(moving)] == [
            line for line in theirs if not line.startswith(moving)
        ]


def test_process_and_garbage_collector_are_there(metrics: Metrics) -> None:
    seen = scrape(metrics)
    assert seen.value("process_resident_memory_bytes") > 0
    assert "python_gc_collections" in seen.types


def test_cache_config_info(metrics: Metrics) -> None:
    (sample,) = [s for s in scrape(metrics).samples if s.name == "vllm:cache_config_info"]
    assert sample.value == 1
    assert sample.labels == {
        "block_size": "16",
        "num_gpu_blocks": "10",
        "num_cpu_blocks": "0",
        "cache_dtype": "float32",
        "enable_prefix_caching": "True",
        "kv_cache_memory_bytes": "1048576",
        "kv_cache_size_tokens": "160",
        "kv_cache_max_concurrency": "2.50",
        "engine": "0",
    }


def test_what_needs_the_engine_comes_when_it_is_ready(engine: FakeEngine) -> None:
    engine.is_ready = False
    metrics = Metrics(engine, "tiny")
    assert "vllm:cache_config_info" not in scrape(metrics).types
    engine.is_ready = True
    seen = scrape(metrics)
    assert {"vllm:cache_config_info", "vllm:request_prompt_tokens"} <= seen.types.keys()


def test_gauges_mirror_the_snapshot(metrics: Metrics) -> None:
    stats = EngineStats(
        num_running=3, num_waiting=2, num_blocks=10, num_used_blocks=4, block_size=16,
        num_used_slots=48,
    )  # fmt: skip
    metrics.record_step(stats, 5)
    seen = scrape(metrics)
    assert seen.value("vllm:num_requests_running") == 3
    assert seen.value("vllm:num_requests_waiting") == 2
    assert seen.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert seen.value("vllm:kv_cache_usage_perc") == 0.4
    assert seen.value("octavo:kv_blocks_free") == 6
    assert seen.value("octavo:kv_waste_ratio") == 0.25
    metrics.record_stats(EngineStats(num_blocks=10, block_size=16))
    seen = scrape(metrics)
    assert seen.value("vllm:num_requests_running") == 0
    assert seen.value("vllm:kv_cache_usage_perc") == 0
    assert seen.value("octavo:kv_waste_ratio") == 0


def test_counters_never_fall(metrics: Metrics) -> None:
    metrics.record_stats(EngineStats(epoch=0, num_generation_tokens=10, busy_s=1.5))
    metrics.record_stats(EngineStats(epoch=0, num_generation_tokens=12, busy_s=2.0))
    metrics.record_stats(EngineStats(epoch=1, num_generation_tokens=5, busy_s=0.25))
    metrics.record_stats(EngineStats(epoch=1, num_generation_tokens=6, busy_s=0.5))
    seen = scrape(metrics)
    assert seen.value("vllm:generation_tokens_total") == 18
    assert seen.value("octavo:engine_busy_seconds_total") == 2.5


def test_gauges_of_sharing_and_of_the_host_tier(metrics: Metrics) -> None:
    metrics.record_stats(
        EngineStats(
            num_cached_blocks=5, num_shared_blocks=2, num_saved_blocks=3, num_host_blocks=8,
            num_used_host_blocks=4,
        )
    )  # fmt: skip
    seen = scrape(metrics)
    assert seen.value("octavo:kv_blocks_cached") == 5
    assert seen.value("octavo:kv_blocks_shared") == 2
    assert seen.value("octavo:kv_blocks_saved_by_sharing") == 3
    assert seen.value("octavo:kv_host_blocks_total") == 8
    assert seen.value("octavo:kv_host_blocks_used") == 4


def test_hits_preemptions_and_swaps_are_told_apart(metrics: Metrics) -> None:
    metrics.record_stats(
        EngineStats(
            num_prompt_tokens=100, prefix_cache_queries=100, prefix_cache_hits=60,
            prefix_cache_host_hits=16, prefix_cache_inside_block_hits=12, num_preemptions=5,
            num_preemptions_by_swap=2, num_blocks_swapped_out=7, num_blocks_swapped_in=6,
            swapped_out_bytes=700, swapped_in_bytes=600, num_evictions=9,
        )
    )  # fmt: skip
    seen = scrape(metrics)
    by_source = "vllm:prompt_tokens_by_source_total"
    assert seen.value(by_source, source="local_compute") == 40
    assert seen.value(by_source, source="local_cache_hit") == 60
    cached = "vllm:prompt_tokens_cached_by_source_total"
    assert seen.value(cached, source="device") == 44
    assert seen.value(cached, source="host") == 16
    assert seen.value("vllm:prompt_tokens_cached_total") == 60
    hits = "octavo:prefix_cache_hit_tokens_total"
    assert [seen.value(hits, source=s) for s in ("device", "host", "inside_block")] == [32, 16, 12]
    assert seen.value("octavo:preemptions_total", kind="recompute") == 3
    assert seen.value("octavo:preemptions_total", kind="swap") == 2
    assert seen.value("vllm:num_preemptions_total") == 5
    assert seen.value("octavo:kv_blocks_swapped_total", direction="out") == 7
    assert seen.value("octavo:kv_blocks_swapped_total", direction="in") == 6
    assert seen.value("octavo:kv_swapped_bytes_total", direction="out") == 700
    assert seen.value("octavo:kv_swapped_bytes_total", direction="in") == 600
    assert seen.value("octavo:prefix_cache_evictions_total") == 9


def test_a_difference_that_dips_neither_falls_nor_counts_twice(metrics: Metrics) -> None:
    """Hits are counted when a request is admitted, prompt tokens when they are computed."""
    metrics.record_stats(EngineStats(num_prompt_tokens=0, prefix_cache_hits=32))
    metrics.record_stats(EngineStats(num_prompt_tokens=40, prefix_cache_hits=32))
    seen = scrape(metrics)
    assert seen.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 8
    assert seen.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32


def test_block_times_add_up_over_engine_lives(metrics: Metrics) -> None:
    def record(epoch: int, first: int, last: int, total_s: float) -> None:
        counts = HistogramCounts((first, *[0] * 20, last), total_s)
        metrics.record_stats(EngineStats(epoch=epoch, block_lifetimes=counts))

    record(0, 1, 2, 4000.0)
    record(0, 3, 2, 4000.5)
    record(1, 1, 0, 0.5)
    record(1, 1, 1, 2000.5)
    seen = scrape(metrics)
    name = "vllm:kv_block_lifetime_seconds"
    assert seen.value(f"{name}_bucket", le="0.001") == 4
    assert seen.value(f"{name}_bucket", le="1800.0") == 4
    assert seen.value(f"{name}_bucket", le="+Inf") == 7
    assert seen.value(f"{name}_count") == 7
    assert seen.value(f"{name}_sum") == 6001
    assert seen.value("vllm:kv_block_idle_before_evict_seconds_count") == 0


def test_counting_rule(metrics: Metrics) -> None:
    """Ten requests, one after the other, of 7 prompt tokens and 10 generated ones."""
    stats = EngineStats(num_blocks=10, block_size=16)
    for _ in range(10):
        for step in range(10):
            num_tokens = 7 + 1 if step == 0 else 1
            stats = replace(
                stats,
                num_steps=stats.num_steps + 1,
                num_prompt_tokens=stats.num_prompt_tokens + (7 if step == 0 else 0),
                num_generation_tokens=stats.num_generation_tokens + 1,
            )
            metrics.record_step(stats, num_tokens)
            if step == 0:
                metrics.record_first_token(0.01)
            else:
                metrics.record_inter_token(0.02)
        metrics.record_finished(
            RequestRecord(
                FinishReason.LENGTH,
                num_prompt_tokens=7,
                num_generation_tokens=10,
                max_num_generation_tokens=10,
                num_cached_tokens=0,
                n=1,
                max_tokens=10,
                num_preemptions=0,
                e2e_s=1.0,
                queue_s=0.0,
                prefill_s=0.1,
                decode_s=0.9,
                inference_s=1.0,
            )
        )
    seen = scrape(metrics)
    assert seen.value("vllm:time_to_first_token_seconds_count") == 10
    assert seen.value("vllm:inter_token_latency_seconds_count") == 90
    for name in ("e2e_request_latency", "request_queue_time", "request_inference_time"):
        assert seen.value(f"vllm:{name}_seconds_count") == 10
    for name in ("prefill_time", "decode_time", "time_per_output_token"):
        assert seen.value(f"vllm:request_{name}_seconds_count") == 10
    assert seen.value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(1.0)
    assert seen.value("vllm:request_num_preemptions_count") == 10
    assert seen.value("vllm:request_prompt_tokens_sum") == 70
    assert seen.value("vllm:request_prefill_kv_computed_tokens_sum") == 70
    assert seen.value("vllm:request_generation_tokens_sum") == 100
    assert seen.value("vllm:request_max_num_generation_tokens_sum") == 100
    assert seen.value("vllm:request_params_max_tokens_sum") == 100
    assert seen.value("vllm:iteration_tokens_total_sum") == 10 * (7 + 10)
    assert seen.value("vllm:iteration_tokens_total_count") == 100
    assert seen.value("vllm:prompt_tokens_total") == 70
    assert seen.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 70
    assert seen.value("vllm:generation_tokens_total") == 100
    assert seen.value("vllm:request_success_total", finished_reason="length") == 10
    assert seen.value("octavo:steps_total") == 100


def test_times_that_never_were_are_not_observed(metrics: Metrics) -> None:
    metrics.record_finished(RequestRecord(FinishReason.ABORT, 7, 0, 0, 0, 1, 16, 0, e2e_s=2.0))
    seen = scrape(metrics)
    assert seen.value("vllm:e2e_request_latency_seconds_count") == 1
    assert seen.value("vllm:request_queue_time_seconds_count") == 0
    assert seen.value("vllm:request_success_total", finished_reason="abort") == 1


@pytest.mark.anyio
async def test_http_requests_are_counted_by_route(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "a"})
    await client.post("/v1/completions", json={"prompt": ""})
    await client.get("/v1/models/alias/one")
    await client.get("/metrics")
    for i in range(20):
        await client.get(f"/nowhere/{i}")
        await client.request(f"M{i}", "/v1/models")
        await client.get(f"/v1/models/m{i}")
        await client.post("/v1/completions", json={"prompt": "a", "user": f"u{i}"})
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    seen = Scrape(answer.content)
    post = {"handler": "/v1/completions", "method": "POST"}
    assert seen.value("http_requests_total", **post, status="2xx") == 21
    assert seen.value("http_requests_total", **post, status="4xx") == 1
    assert seen.value("http_request_duration_seconds_count", **post) == 22
    nowhere = {"handler": "none", "method": "GET", "status": "4xx"}
    assert seen.value("http_requests_total", **nowhere) == 20
    counted = [s.labels for s in seen.samples if s.name == "http_requests_total"]
    assert len(counted) == 6
    assert {labels["method"] for labels in counted} == {"GET", "POST", "other"}
