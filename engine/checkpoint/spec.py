"""What a checkpoint says about its model, in octavo's terms.

Owns the frozen description that every later part reads. Must not know file formats, tensors or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import CheckpointError

GATES = ("silu", "gelu_pytorch_tanh")
UNGATED = ("gelu", "gelu_pytorch_tanh")
DEFAULT_ROPE_THETA = 10000.0
MAX_LAYERS = 1024
MAX_EXPERTS = 1024  # of a layer
MAX_ALL_EXPERTS = 1 << 16  # of all layers: each has three tensors with names
MAX_POSITIONS = 1 << 22  # a table of that many rows of cosines and sines is built


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    ``scaling`` is ``None`` for plain frequencies, else a mapping with ``rope_type``:

    - ``linear``: ``factor``;
    - ``yarn``: ``factor``, ``beta_fast``, ``beta_slow``, ``truncate``, ``original_max_position_embeddings``;
    - ``longrope``: ``short_factor`` and ``long_factor``, one divisor per frequency each, and
      ``original_max_position_embeddings``, past which the long ones count;
    - ``llama3``: ``factor``, ``low_freq_factor``, ``high_freq_factor``,
      ``original_max_position_embeddings``;
    - ``factors``: ``factors``, one divisor per frequency, as GGUF files carry them.
    """

    theta: float
    rotary_dim: int  # the first rotary_dim numbers of a head are rotated
    scaling: Mapping[str, Any] | None = None
    attention_factor: float = 1.0  # cosines and sines are multiplied by it


@dataclass(frozen=True)
class ExpertSpec:
    """A layer's mixture of experts in place of one feed-forward."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of one expert
    renormalise: bool  # the weights of a token's experts add up to 1


@dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer may do otherwise than its neighbours."""

    rope: RopeSpec | None  # None: queries and keys are not rotated
    window: int | None  # tokens that a query sees, itself included; None: all before it
    experts: ExpertSpec | None = None


@dataclass(frozen=True)
class ModelSpec:
    """Shape and kind of a decoder-only model.

    The fields with defaults are what a family adds to Llama; :mod:`..models.decoder` computes them all.
    """

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
    attention_bias: bool  # of q, k and v
    mlp_bias: bool
    hidden_act: str  # of the gate: one of GATES; without a gate: one of UNGATED
    sliding_window: int | None  # tokens that a query sees, itself included
    dtype: str  # "float32", "bfloat16" or "float16": what the weights were saved in
    is_quantized: bool = False
    quantization: str | None = None  # the commonest quantised tensor type, e.g. "Q4_1"

    layers: tuple[LayerSpec, ...] = ()  # one per layer; empty: all have `rope` and `sliding_window`
    attention_out_bias: bool = False
    has_fused_tensors: bool = False  # the checkpoint holds qkv_proj and gate_up_proj
    norms: Literal["pre", "post", "both"] = "pre"  # around attention and feed-forward
    norm_kind: Literal["rms", "layer"] = "rms"  # layer norms have biases
    norm_offset: float = 0.0  # a norm's weight is what the checkpoint holds plus this
    qk_norm: Literal["head", "token"] | None = (
        None  # of each head; of all heads of a token together
    )
    qkv_limit: float | None = None  # queries, keys and values are cut to -limit .. limit
    is_parallel: bool = (
        False  # attention and feed-forward look at the same sum, and both are added to it
    )
    has_gate: bool = True  # in the feed-forward; else it is down(act(up(x)))
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None  # logits become cap * tanh(logits / cap)
    implementation: Literal["octavo", "transformers"] = "octavo"  # whose code computes it

    def layer(self, index: int) -> LayerSpec:
        """Layer ``index`` of ``num_layers``."""
        return self.layers[index] if self.layers else LayerSpec(self.rope, self.sliding_window)


def auto_dtype(spec: ModelSpec, *, on_cpu: bool, has_bfloat16: bool) -> str:
    """What ``--dtype auto`` means: the checkpoint's type; on a CPU, quantised, float16 and bfloat16 weights are
    computed in bfloat16 where the processor has it, else in float32."""
    if on_cpu and (spec.is_quantized or spec.dtype != "float32"):
        return "bfloat16" if has_bfloat16 else "float32"
    return spec.dtype


def check_counts(spec: ModelSpec, where: str) -> None:
    """Whether so many layers and positions may be described one by one.

    Raises:
        CheckpointError: they are too many.
    """
    if spec.num_layers > MAX_LAYERS or spec.max_position_embeddings > MAX_POSITIONS:
        raise CheckpointError(
            f"{where}: {spec.num_layers} layers and {spec.max_position_embeddings} positions; octavo "
            f"goes up to {MAX_LAYERS} and {MAX_POSITIONS}."
        )


def check_spec(spec: ModelSpec, where: str) -> None:
    """Whether the numbers fit each other.

    Raises:
        CheckpointError: they do not.
    """
    if spec.num_q_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{where}: {spec.num_q_heads} query heads cannot share {spec.num_kv_heads} key-value heads."
        )
    if spec.layers and len(spec.layers) != spec.num_layers:
        raise CheckpointError(
            f"{where}: {len(spec.layers)} layers are described, and the model has {spec.num_layers}."
        )
    experts = [layer.experts.num_experts for layer in spec.layers if layer.experts is not None]
    if sum(experts) > MAX_ALL_EXPERTS:
        raise CheckpointError(
            f"{where}: {sum(experts)} experts in all layers; octavo goes up to {MAX_ALL_EXPERTS}."
        )
    for layer in (spec.layer(index) for index in range(spec.num_layers)):
        if layer.rope is not None:
            _check_rope(layer.rope, spec.head_dim, where)
        if layer.experts is not None:
            _check_experts(layer.experts, spec, where)
    known = GATES if spec.has_gate else UNGATED
    if spec.hidden_act not in known:
        raise CheckpointError(
            f"{where}: hidden_act {spec.hidden_act} is not supported for {spec.architecture}; "
            f"octavo knows {', '.join(known)}."
        )


def _check_experts(experts: ExpertSpec, spec: ModelSpec, where: str) -> None:
    if experts.top_k > experts.num_experts or experts.num_experts > MAX_EXPERTS:
        raise CheckpointError(
            f"{where}: {experts.top_k} of {experts.num_experts} experts; octavo needs as many as are "
            f"chosen, and at most {MAX_EXPERTS}."
        )
    if spec.hidden_act != "silu":
        raise CheckpointError(
            f"{where}: hidden_act {spec.hidden_act} is not supported in experts; silu is."
        )


def _check_rope(rope: RopeSpec, head_dim: int, where: str) -> None:
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise CheckpointError(
            f"{where}: {rope.rotary_dim} rotated numbers per head of {head_dim}; "
            "octavo needs an even count within the head."
        )
    is_yarn = rope.scaling is not None and rope.scaling["rope_type"] == "yarn"
    if is_yarn and rope.theta <= 1:
        raise CheckpointError(f"{where}: a rope_theta of {rope.theta} with yarn; it must exceed 1.")
