"""What a checkpoint says about its model, in octavo's terms.

Owns the frozen description that every later part reads. Must not know file formats, tensors or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DEFAULT_ROPE_THETA = 10000.0
MAX_LAYERS = 1024
MAX_POSITIONS = 1 << 22  # a table of that many rows of cosines and sines is built


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


def auto_dtype(spec: ModelSpec, *, on_cpu: bool, has_bfloat16: bool) -> str:
    """What ``--dtype auto`` means: the checkpoint's type; on a CPU, quantised, float16 and bfloat16 weights are
    computed in bfloat16 where the processor has it, else in float32."""
    if on_cpu and (spec.is_quantized or spec.dtype != "float32"):
        return "bfloat16" if has_bfloat16 else "float32"
    return spec.dtype


def check_spec(spec: ModelSpec, where: str) -> None:
    """Whether the numbers fit each other.

    Raises:
        CheckpointError: they do not.
    """
    if spec.num_q_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{where}: {spec.num_q_heads} query heads cannot share {spec.num_kv_heads} key-value heads."
        )
    if spec.rope.rotary_dim % 2 or not 0 < spec.rope.rotary_dim <= spec.head_dim:
        raise CheckpointError(
            f"{where}: {spec.rope.rotary_dim} rotated numbers per head of {spec.head_dim}; "
            "octavo needs an even count within the head."
        )
    if spec.num_layers > MAX_LAYERS or spec.max_position_embeddings > MAX_POSITIONS:
        raise CheckpointError(
            f"{where}: {spec.num_layers} layers and {spec.max_position_embeddings} positions; octavo "
            f"goes up to {MAX_LAYERS} and {MAX_POSITIONS}."
        )
    if spec.hidden_act != "silu":
        raise CheckpointError(
            f"{where}: hidden_act {spec.hidden_act} is not supported by {spec.architecture}; silu is."
        )
