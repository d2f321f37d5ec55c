"""A model that could be served from this machine's disks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine's disks, and whether its memory would suffice. ``None``: it cannot be served."""

    name: str  # as ``octavo serve`` takes it
    path: str
    revision: str | None  # of the Hub's repository: its branch or tag, else its commit
    size_bytes: int  # on disk
    free_bytes: int  # of the memory that it would be loaded into
    problem: str | None = None  # why it cannot be served
    architecture: str | None = None
    dtype: str | None = None  # that --dtype auto chooses here
    quantization: str | None = None  # the commonest type of its matrices, where they are quantised
    window: int | None = None  # tokens
    weight_bytes: int | None = None  # in memory, about
    kv_bytes_per_1k_tokens: int | None = (
        None  # at most: layers with a window of their own need less
    )
    max_tokens: int | None = None  # of one sequence, whose keys and values fit beside the weights
    fits: bool | None = None  # 1000 tokens, or the whole window, fit
