"""Tables of metrics that are read straight from a snapshot, and the histograms' buckets."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.stats import EngineStats, HistogramCounts
from .responses_metrics import STORE_REASON

Read = Callable[[EngineStats], float]

REJECTION_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "engine_restarting",
    STORE_REASON,
)


def _usage(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


def _waste(stats: EngineStats) -> float:
    num_slots = stats.num_used_blocks * stats.block_size
    return 1.0 - stats.num_used_slots / num_slots if num_slots else 0.0


GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("vllm:num_requests_running", "Requests being computed.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests waiting to be computed.", lambda s: s.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _usage),
    ("octavo:kv_blocks_total", "KV blocks.", lambda s: s.num_blocks),
    ("octavo:kv_blocks_used", "KV blocks that a sequence refers to.", lambda s: s.num_used_blocks),
    ("octavo:kv_blocks_free", "KV blocks that can be allocated.", lambda s: s.num_free_blocks),
    ("octavo:kv_slots_used", "Slots of used blocks that hold a token.", lambda s: s.num_used_slots),
    ("octavo:kv_waste_ratio", "Share of used blocks' slots without a token, 0 to 1.", _waste),
    (
        "octavo:kv_blocks_cached",
        "KV blocks that can be found by their content, in use or free.",
        lambda s: s.num_cached_blocks,
    ),
    (
        "octavo:kv_blocks_shared",
        "KV blocks that more than one sequence refers to.",
        lambda s: s.num_shared_blocks,
    ),
    (
        "octavo:kv_blocks_saved_by_sharing",
        "KV blocks that would be needed on top if every sequence had its own.",
        lambda s: s.num_saved_blocks,
    ),
    ("octavo:kv_host_blocks_total", "KV blocks in host memory.", lambda s: s.num_host_blocks),
    (
        "octavo:kv_host_blocks_used",
        "KV blocks in host memory that hold a preempted sequence or an evicted prefix.",
        lambda s: s.num_used_host_blocks,
    ),
)

# Exposed with the suffix _total.
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens, cached ones included.", lambda s: s.num_prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda s: s.num_generation_tokens),
    ("vllm:num_preemptions", "Preemptions of requests.", lambda s: s.num_preemptions),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_cache_queries,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_cache_hits,
    ),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens that were not computed.",
        lambda s: s.prefix_cache_hits,
    ),
    (
        "vllm:corrupted_requests",
        "Requests ended because their logits were not finite.",
        lambda s: s.num_nonfinite_rows,
    ),
    ("octavo:steps", "Engine steps.", lambda s: s.num_steps),
    ("octavo:step_tokens", "Tokens scheduled, over all steps.", lambda s: s.num_scheduled_tokens),
    ("octavo:engine_busy_seconds", "Time that the engine spent in steps.", lambda s: s.busy_s),
    (
        "octavo:schedule_seconds",
        "Of it, scheduling and bookkeeping.",
        lambda s: s.schedule_s,
    ),
    (
        "octavo:kv_slot_steps_allocated",
        "Slots of used blocks, summed over steps.",
        lambda s: s.kv_slot_steps_allocated,
    ),
    (
        "octavo:copy_on_write",
        "Blocks copied because a sequence wrote to one that others shared.",
        lambda s: s.num_block_copies,
    ),
    (
        "octavo:kv_slot_steps_used",
        "Slots that held a token, summed over steps.",
        lambda s: s.kv_slot_steps_used,
    ),
    (
        "octavo:prefix_cache_evictions",
        "Cached KV blocks whose memory was taken for something else.",
        lambda s: s.num_evictions,
    ),
)


def _zero(_stats: EngineStats) -> float:
    return 0


# (name, meaning, label, what to read for each of its values). Exposed with the suffix _total.
LABELLED_COUNTERS: tuple[tuple[str, str, str, tuple[tuple[str, Read], ...]], ...] = (
    (
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where they came from.",
        "source",
        (
            ("local_compute", lambda s: s.num_prompt_tokens - s.prefix_cache_hits),
            ("local_cache_hit", lambda s: s.prefix_cache_hits),
            ("external_kv_transfer", _zero),
        ),
    ),
    (
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens that were not computed, by where they were found.",
        "source",
        (
            ("device", lambda s: s.prefix_cache_hits - s.prefix_cache_host_hits),
            ("host", lambda s: s.prefix_cache_host_hits),
            ("p2p", _zero),
            ("disk", _zero),
            ("external_unspecified", _zero),
        ),
    ),
    (
        "octavo:prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache: in whole blocks on the device or in host memory, "
        "or inside a block that agrees only in its first tokens.",
        "source",
        (
            (
                "device",
                lambda s: (
                    s.prefix_cache_hits
                    - s.prefix_cache_host_hits
                    - s.prefix_cache_inside_block_hits
                ),
            ),
            ("host", lambda s: s.prefix_cache_host_hits),
            ("inside_block", lambda s: s.prefix_cache_inside_block_hits),
        ),
    ),
    (
        "octavo:preemptions",
        "Preemptions of requests by what became of their KV blocks.",
        "kind",
        (
            ("recompute", lambda s: s.num_preemptions - s.num_preemptions_by_swap),
            ("swap", lambda s: s.num_preemptions_by_swap),
        ),
    ),
    (
        "octavo:kv_blocks_swapped",
        "KV blocks copied between the device and host memory; out is to the host.",
        "direction",
        (
            ("out", lambda s: s.num_blocks_swapped_out),
            ("in", lambda s: s.num_blocks_swapped_in),
        ),
    ),
    (
        "octavo:kv_swapped_bytes",
        "Bytes copied between the device and host memory; out is to the host.",
        "direction",
        (("out", lambda s: s.swapped_out_bytes), ("in", lambda s: s.swapped_in_bytes)),
    ),
)

# Seconds; every evicted block is observed.
BLOCK_TIMES: tuple[tuple[str, str, Callable[[EngineStats], HistogramCounts]], ...] = (
    (
        "vllm:kv_block_lifetime_seconds",
        "From the allocation of a KV block to its eviction.",
        lambda s: s.block_lifetimes,
    ),
    (
        "vllm:kv_block_idle_before_evict_seconds",
        "From the last use of a KV block to its eviction.",
        lambda s: s.block_idle_times,
    ),
)

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``most``."""
    buckets: list[int] = []
    power = 1
    while power <= most:
        buckets += [power * digit for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return tuple(buckets)
