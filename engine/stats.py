"""Counters and gauges that the engine reports, and where they are delivered.

Counters are cumulative within one engine life (``epoch``), so a lost snapshot loses nothing; whoever
exports them adds differences and starts over when the epoch changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .api.output import FinishReason

BLOCK_TIME_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper bounds in seconds of the histograms of block times."""


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram as cumulative numbers of one engine life."""

    counts: tuple[int, ...] = (0,) * (len(BLOCK_TIME_BUCKETS) + 1)  # per bucket, the last above all
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot, taken between two steps."""

    epoch: int = 0
    # gauges
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0  # referenced by a block table; cached but unreferenced ones are free
    block_size: int = 0
    num_used_slots: int = 0  # slots of used blocks that hold a token's keys and values
    num_cached_blocks: int = 0  # findable by content, in use or free
    num_shared_blocks: int = 0  # that more than one block table points at
    num_saved_blocks: int = 0  # table entries minus used blocks: what sharing saves
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0  # that hold a preempted sequence or an evicted prefix
    # counters
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed or found in the cache
    num_generation_tokens: int = 0
    num_preemptions: int = 0  # of whole requests, both kinds
    num_preemptions_by_swap: int = 0
    num_block_copies: int = 0  # copy-on-write of a shared block
    num_nonfinite_rows: int = 0  # rows ended because their logits were not finite
    kv_slot_steps_allocated: int = 0  # sum over steps of num_used_blocks * block_size
    kv_slot_steps_used: int = 0  # sum over steps of num_used_slots
    prefix_cache_queries: int = 0  # tokens looked up when their request was first admitted
    prefix_cache_hits: int = 0  # of them, tokens found; the next two are part of it
    prefix_cache_host_hits: int = 0  # came back from the host tier
    prefix_cache_inside_block_hits: int = 0  # found in a block that agrees only in its first tokens
    num_evictions: int = 0  # cached blocks whose memory was taken for something else
    num_blocks_swapped_out: int = 0  # device to host
    num_blocks_swapped_in: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    block_lifetimes: HistogramCounts = HistogramCounts()  # allocation to eviction, seconds
    block_idle_times: HistogramCounts = HistogramCounts()  # last use to eviction, seconds
    busy_s: float = 0.0  # time spent in steps
    schedule_s: float = 0.0  # of it, scheduling and bookkeeping

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self.num_used_blocks


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request, for histograms. Times are durations in seconds."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_num_generation_tokens: int  # over its sequences
    num_cached_tokens: int
    n: int
    max_tokens: int  # that the request could have had
    num_preemptions: int
    e2e_s: float
    queue_s: float | None = None  # arrival to first scheduled
    prefill_s: float | None = None  # first scheduled to first token
    decode_s: float | None = None  # first to last token
    inference_s: float | None = None  # first scheduled to last token


class StatsSink(Protocol):
    """Receives what happened. Called on the front end's event loop; must be quick."""

    def record_step(self, stats: EngineStats, num_step_tokens: int) -> None:
        """A step ended, having computed ``num_step_tokens`` prompt tokens plus generated ones."""

    def record_stats(self, stats: EngineStats) -> None:
        """A snapshot without a step (the engine went idle)."""

    def record_first_token(self, ttft_s: float) -> None: ...

    def record_inter_token(self, itl_s: float) -> None: ...

    def record_finished(self, record: RequestRecord) -> None: ...
