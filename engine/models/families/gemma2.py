"""Gemma 2 (Gemma team, 2024, arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import SLIDING, read_layer_types
from ...checkpoint.spec import LayerSpec, ModelSpec, RopeSpec
from ..family import Family

if TYPE_CHECKING:
    from ....kernels.ops import Ops
    from ..model import Model
    from ..weights import Weights

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


class Gemma2(Family):
    """Norms before and after, soft caps, scaled embeddings, a gate of GELU, a window in every other layer."""

    architectures = ("Gemma2ForCausalLM",)
    models = "Gemma 2"
    defaults = DEFAULTS | {
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    gguf_architecture = "gemma2"

    pattern: ClassVar[int] = 2
    """Of so many layers all but the last have a window, where a file does not say otherwise."""

    num_layers_of_27b: ClassVar[int] = 46
    """By which GGUF files tell the one size whose heads are scaled otherwise."""

    gguf_caps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)
    """Of scores and logits where a GGUF file names none: the first ones did not, and llama.cpp caps them so."""

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, norms="both", embedding_scale=spec.hidden_size**0.5)

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        if config.flag("use_bidirectional_attention"):
            config.refuse("use_bidirectional_attention", True, "false")
        kinds = read_layer_types(config, spec.num_layers)
        is_windowed = (
            _is_windowed(spec, self.pattern_of(config))
            if kinds is None
            else [kind == SLIDING for kind in kinds]
        )
        window = config.size("sliding_window") if any(is_windowed) else None
        has_bias = config.flag("attention_bias")
        spec = replace(
            spec,
            layers=_layers(spec.rope, self.local_rope(config, spec), window, is_windowed),
            hidden_act=config.text("hidden_activation", "gelu_pytorch_tanh"),
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            norm_offset=1.0,
            attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
            attention_soft_cap=_number_or_none(config, "attn_logit_softcapping"),
            logits_soft_cap=_number_or_none(config, "final_logit_softcapping"),
        )
        return self.complete(spec)

    def pattern_of(self, config: Fields) -> int:
        return self.pattern

    def local_rope(self, config: Fields, spec: ModelSpec) -> RopeSpec:
        """Of layers with a window."""
        return spec.rope

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        """The files hold norms with 1 added."""
        pattern = metadata.size("attention.sliding_window_pattern", self.pattern)
        is_windowed = _is_windowed(spec, pattern)
        window = metadata.size("attention.sliding_window") if any(is_windowed) else None
        is_27b = spec.num_layers == self.num_layers_of_27b
        score_cap, logit_cap = self.gguf_caps
        scaled = spec.hidden_size // spec.num_q_heads if is_27b else spec.head_dim
        spec = replace(
            spec,
            layers=_layers(spec.rope, self.local_rope_gguf(metadata, spec), window, is_windowed),
            hidden_act="gelu_pytorch_tanh",
            attention_scale=scaled**-0.5,
            attention_soft_cap=_number_or_none(metadata, "attn_logit_softcapping", score_cap),
            logits_soft_cap=_number_or_none(metadata, "final_logit_softcapping", logit_cap),
        )
        return self.complete(spec)

    def local_rope_gguf(self, metadata: Fields, spec: ModelSpec) -> RopeSpec:
        return spec.rope

    def build(self, spec: ModelSpec, weights: Weights, ops: Ops) -> Model:
        """The models were trained with an embedding's scale of the weights' type."""
        import torch

        scale = torch.tensor(spec.embedding_scale, dtype=weights.dtype).item()
        return super().build(replace(spec, embedding_scale=scale), weights, ops)


def _is_windowed(spec: ModelSpec, pattern: int) -> list[bool]:
    return [(index + 1) % pattern != 0 for index in range(spec.num_layers)]


def _layers(
    rope: RopeSpec, local: RopeSpec, window: int | None, is_windowed: Sequence[bool]
) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(local, window) if w else LayerSpec(rope, None) for w in is_windowed)


def _number_or_none(fields: Fields, key: str, default: float | None = None) -> float | None:
    return default if fields.get(key) is None else fields.number(key)


FAMILIES = (Gemma2(),)
