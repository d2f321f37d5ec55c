"""What configurations say of mixtures of experts, in the spelling of each kind of file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .fields import Fields
from .spec import ExpertSpec, LayerSpec, ModelSpec

SOFTMAX = 1  # llama.cpp's LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX


def with_experts(
    spec: ModelSpec, experts: ExpertSpec, dense_layers: Collection[int] = ()
) -> ModelSpec:
    """``spec`` with ``experts`` in all layers but ``dense_layers``; all have its rope and window."""
    plain = LayerSpec(spec.rope, spec.sliding_window)
    mixed = replace(plain, experts=experts)
    layers = (plain if index in dense_layers else mixed for index in range(spec.num_layers))
    return replace(spec, layers=tuple(layers))


def read_gguf_experts(metadata: Fields, spec: ModelSpec, *, renormalise: bool) -> ExpertSpec:
    """The keys that llama.cpp's architectures share.

    Args:
        renormalise: whether the architecture's weights add up to 1, where the file does not say it.

    Raises:
        CheckpointError: the file asks for routing that is not computed.
    """
    if (function := metadata.size_or_none("expert_gating_func") or SOFTMAX) != SOFTMAX:
        metadata.refuse("expert_gating_func", function, f"{SOFTMAX}, the softmax")
    if (scale := metadata.number("expert_weights_scale", 1.0)) != 1:
        metadata.refuse("expert_weights_scale", scale, "1")
    if shared := metadata.size_or_none("expert_shared_count"):
        metadata.refuse("expert_shared_count", shared, "0")
    return ExpertSpec(
        num_experts=metadata.size("expert_count"),
        top_k=metadata.size("expert_used_count"),
        intermediate_size=metadata.size("expert_feed_forward_length", spec.intermediate_size),
        renormalise=metadata.flag("expert_weights_norm", renormalise),
    )
