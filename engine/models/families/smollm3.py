"""SmolLM3 (Hugging Face, 2025)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import SLIDING, read_layer_types
from ...checkpoint.spec import LayerSpec, ModelSpec
from ..family import Family

INTERVAL = 4  # every fourth layer, by default


class SmolLM3(Family):
    """Llama whose every fourth layer does not rotate queries and keys."""

    architectures = ("SmolLM3ForCausalLM",)
    models = "SmolLM3"
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }
    gguf_architecture = "smollm3"
    has_gguf_pairs = True

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        has_bias = config.flag("attention_bias")
        return replace(
            spec,
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            mlp_bias=config.flag("mlp_bias"),
            layers=_layers(config, spec),
        )

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        rotates = _rotates_by_interval(spec.num_layers, INTERVAL)
        return replace(spec, layers=_layers_that_rotate(spec, rotates))


def _layers(config: Fields, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    rotates = _rotates(config, spec.num_layers)
    layers = _layers_that_rotate(spec, rotates)
    if not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return layers
    window, kinds = config.size("sliding_window"), read_layer_types(config, spec.num_layers)
    windowed = (
        [kind == SLIDING for kind in kinds] if kinds is not None else [not one for one in rotates]
    )
    return tuple(
        replace(layer, window=window) if has_window else layer
        for layer, has_window in zip(layers, windowed, strict=True)
    )


def _layers_that_rotate(spec: ModelSpec, rotates: list[bool]) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(spec.rope if does else None, None) for does in rotates)


def _rotates(config: Fields, num_layers: int) -> list[bool]:
    """``no_rope_layers``, which says 1 of a layer that rotates, or every layer but each n-th."""
    given = config.get("no_rope_layers")
    if given is None:
        return _rotates_by_interval(num_layers, config.size("no_rope_layer_interval", INTERVAL))
    if (
        not isinstance(given, list)
        or len(given) < num_layers
        or any(x not in (0, 1) for x in given)
    ):
        config.refuse("no_rope_layers", given, f"a list of {num_layers} zeros and ones")
    return [bool(one) for one in given[:num_layers]]


def _rotates_by_interval(num_layers: int, interval: int) -> list[bool]:
    return [(index + 1) % interval != 0 for index in range(num_layers)]


FAMILIES = (SmolLM3(),)
