"""Shapes of published models, as numbers: what benchmarks and the roofline page compute with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama-like model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    max_positions: int = 8192


SHAPES = {
    "Llama-3-8B": Shape(128256, 4096, 14336, 32, 32, 8, 128, False),
    "Qwen3-0.6B": Shape(151936, 1024, 3072, 28, 16, 8, 128, True),
    "SmolLM2-135M": Shape(49152, 576, 1536, 30, 9, 3, 64, True),
    "tiny": Shape(320, 128, 96, 2, 2, 1, 64, True, max_positions=512),
}
"""As published, but for "tiny"; without Qwen3's norms of queries and keys, which no family here has yet."""
