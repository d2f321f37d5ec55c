"""What an engine tells of itself once it is ready, and how far it has come until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine tells its callers once it is ready."""

    model: str  # path of the checkpoint
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    attention_backend: str
    num_threads: int
    num_parameters: int
    load_s: float
    num_host_blocks: int = 0  # of the host tier
    enable_prefix_caching: bool = True
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20  # alternatives that may be asked for; -1: any number
    scheduling_policy: str = "fcfs"  # "priority": requests may have one; "fair"
    hidden_size: int = 0  # numbers in an embedding
    pooling_type: str = "last"  # of embeddings that ask for none
    kv_windows: tuple[int | None, ...] = (None,)  # per KV group: tokens that a query sees, or all
    num_sequence_blocks: int = 0  # most blocks of one sequence of max_model_len; 0: without windows

    @property
    def kv_concurrency(self) -> float:
        """Sequences of ``max_model_len`` tokens that the KV cache holds at once."""
        without_windows = -(-self.max_model_len // self.block_size) * len(self.kv_windows)
        return self.num_blocks / (self.num_sequence_blocks or without_windows)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds; where there are windows, of the longest sequences."""
        if self.kv_windows == (None,):
            return self.num_blocks * self.block_size
        return int(self.kv_concurrency * self.max_model_len)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the start has come."""

    stage: str  # "downloading", "starting", "loading", "packing", "warming", "ready"; "restarting" after a death
    fraction: float  # 0..1, of the download, then of the whole start
