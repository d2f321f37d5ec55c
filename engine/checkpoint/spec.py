"""What a checkpoint says about its model, in octavo's terms.

Owns the frozen description that every later part reads. Must not know file formats, tensors or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    ``scaling`` is ``None`` for plain frequencies, else a mapping with ``rope_type``:

    - ``linear``: ``factor``;
    - ``llama3``: ``factor``, ``low_freq_factor``, ``high_freq_factor``,
      ``original_max_position_embeddings``;
    - ``factors``: ``factors``, one divisor per frequency, as GGUF files carry them.
    """

    theta: float
    rotary_dim: int  # the first rotary_dim numbers of a head are rotated
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ModelSpec:
    """Shape and kind of a decoder-only model."""

    architecture: str  # transformers' class name, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    sliding_window: int | None  # tokens that a query sees, itself included
    dtype: str  # "float32", "bfloat16" or "float16": what the weights were saved in
    is_quantized: bool = False
    quantization: str | None = None  # the commonest quantised tensor type, e.g. "Q4_1"
