"""Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv 2407.10671)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import SLIDING, read_layer_types
from ...checkpoint.spec import LayerSpec, ModelSpec
from ..family import Family

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class Qwen2(Family):
    """Llama with biases on q, k and v; a window, where it is used, in the upper layers."""

    architectures = ("Qwen2ForCausalLM",)
    models = "Qwen2, Qwen2.5"
    defaults = DEFAULTS
    gguf_architecture = "qwen2"

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        return replace(with_upper_windows(config, spec), attention_bias=True)


def with_upper_windows(config: Fields, spec: ModelSpec) -> ModelSpec:
    """``use_sliding_window``, then ``layer_types``, or else the layers from ``max_window_layers`` on."""
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return spec
    window, first = config.size("sliding_window"), config.size_or_none("max_window_layers") or 0
    kinds = read_layer_types(config, spec.num_layers)
    is_windowed = (
        [kind == SLIDING for kind in kinds]
        if kinds is not None
        else [index >= first for index in range(spec.num_layers)]
    )
    layers = tuple(LayerSpec(spec.rope, window if windowed else None) for windowed in is_windowed)
    return replace(spec, layers=layers)


FAMILIES = (Qwen2(),)
