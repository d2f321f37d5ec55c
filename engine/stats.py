"""Counters and gauges that the engine reports, and where they are delivered.

Counters are cumulative within one engine life (``epoch``), so a lost snapshot loses nothing; whoever
exports them adds differences and starts over when the epoch changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .api import FinishReason


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
    # counters
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed or found in the cache
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_block_copies: int = 0  # copy-on-write of a shared block
    num_nonfinite_rows: int = 0  # rows ended because their logits were not finite
    kv_slot_steps_allocated: int = 0  # sum over steps of num_used_blocks * block_size
    kv_slot_steps_used: int = 0  # sum over steps of num_used_slots
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
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
