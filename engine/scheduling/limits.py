"""The scheduler's limits, counters and the error of its broken invariants."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OctavoError


class SchedulingError(OctavoError):
    """The scheduler's state contradicts itself. The engine must not go on."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold, resolved."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.0  # share of blocks
    preemption_mode: str = "auto"  # "recompute", "swap"
    max_mixed_prefill_tokens: int | None = None  # prompt tokens of a step that decodes too
    policy: str = "fcfs"  # "priority", "fair"
    priority_aging_s: float = 0.0  # of waiting that is worth one step of priority; 0: strict


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_by_swap: int = 0
    num_block_copies: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_host_hits: int = 0
    prefix_cache_inside_block_hits: int = 0
    num_nonfinite_rows: int = 0
    kv_slot_steps_allocated: int = 0
    kv_slot_steps_used: int = 0
