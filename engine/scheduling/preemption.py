"""Preemption: taking a request's blocks, and whether they are moved to the host tier or computed anew."""

from __future__ import annotations

from ..memory.kv_cache_manager import KVCacheManager
from ..step import ExecutorRates
from .limits import SchedulerCounters, SchedulerLimits
from .request import Request
from .request_table import RequestTable
from .step_draft import StepDraft

MIN_STEP_TOKENS = 64
"""Steps with fewer tokens say little about how fast a prompt is computed."""
WEIGHT = 0.2
"""Of a new observation in a moving average."""


class Rates:
    """Moving averages of how fast the executor computes tokens and moves blocks.

    Args:
        seed: measured at warm-up; ``None``: unknown, and nothing is swapped until it is.
    """

    def __init__(self, seed: ExecutorRates | None = None) -> None:
        self.prefill_tokens_per_s = seed.prefill_tokens_per_s if seed else 0.0
        self.swap_bytes_per_s = seed.swap_bytes_per_s if seed else 0.0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` took that long, swaps not counted."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0.0:
            self.prefill_tokens_per_s = _averaged(self.prefill_tokens_per_s, num_tokens / seconds)

    def note_swap(self, num_bytes: int, seconds: float) -> None:
        """Moving ``num_bytes`` one way took that long."""
        if num_bytes and seconds > 0.0:
            self.swap_bytes_per_s = _averaged(self.swap_bytes_per_s, num_bytes / seconds)

    def prefers_swap(self, unshared_bytes: int, uncached_tokens: int) -> bool:
        """Whether moving out and back beats computing again.

        Args:
            unshared_bytes: to be moved.
            uncached_tokens: to be computed again otherwise.
        """
        if not self.swap_bytes_per_s:
            return False
        if not self.prefill_tokens_per_s:
            return True
        swap_s = 2 * unshared_bytes / self.swap_bytes_per_s
        return swap_s < uncached_tokens / self.prefill_tokens_per_s


def _averaged(average: float, observed: float) -> float:
    return observed if not average else average + WEIGHT * (observed - average)


class Preemption:
    """Takes the blocks of running requests."""

    def __init__(
        self,
        table: RequestTable,
        memory: KVCacheManager,
        limits: SchedulerLimits,
        counters: SchedulerCounters,
        rates: Rates,
    ) -> None:
        self._table = table
        self._memory = memory
        self._limits = limits
        self._counters = counters
        self._rates = rates

    def preempt(self, request: Request, draft: StepDraft) -> None:
        """Take all blocks of ``request``, and its rows out of the step; it waits again."""
        draft.drop({sequence.seq_id for sequence in request.sequences})
        self._swap_out(request)
        self._table.suspend(request)
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._counters.num_preemptions_by_swap += bool(request.host_block_ids)

    def _swap_out(self, request: Request) -> None:
        """Copy to the host tier what only this request holds, if that is the better way."""
        memory, mode = self._memory, self._limits.preemption_mode
        if mode == "recompute" or not memory.cache.host.num_blocks or request.is_mean_pooled:
            return
        live = [(s, s.blocks) for s in request.sequences if s.blocks is not None]
        tables = [blocks for _, blocks in live]
        own = memory.swappable_blocks(tables)
        if mode == "auto" and not self._rates.prefers_swap(
            len(own) * memory.block_bytes, memory.num_uncached_tokens(tables, own)
        ):
            return
        held = memory.swap_out([(blocks, s.token_ids) for s, blocks in live], own)
        if held:
            request.host_block_ids = held
            for sequence, blocks in live:
                sequence.num_swapped_tokens = blocks.num_tokens
