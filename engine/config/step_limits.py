"""What the scheduler's options make of one step, on a CPU and on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from .engine_config import SchedulerConfig


class StepLimits(NamedTuple):
    """What one step may hold."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_mixed_prefill_tokens: int


def step_limits(scheduler: SchedulerConfig, *, on_gpu: bool) -> StepLimits:
    """The step's limits as numbers.

    Raises:
        ConfigError: more sequences than tokens in a step.
    """
    max_tokens = scheduler.max_num_batched_tokens or (2048 if on_gpu else 512)
    max_seqs = scheduler.max_num_seqs or min(128, max_tokens)
    if max_seqs > max_tokens:
        raise ConfigError(
            f"--max-num-seqs {max_seqs} is more than --max-num-batched-tokens {max_tokens}: each "
            "running sequence needs a token of every step."
        )
    max_mixed = scheduler.max_mixed_prefill_tokens or (max_tokens if on_gpu else 128)
    return StepLimits(max_tokens, max_seqs, max_mixed)
