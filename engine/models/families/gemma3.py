"""The text models of Gemma 3 (Gemma team, 2025, arXiv 2503.19786)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import FULL, SLIDING
from ...checkpoint.rope_config import read_rope
from ...checkpoint.spec import ModelSpec, RopeSpec
from .gemma2 import DEFAULTS, Gemma2

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3(Gemma2):
    """Gemma 2 with norms of queries and keys, no caps, and layers with a window, five of six, that rotate faster."""

    architectures = ("Gemma3ForCausalLM",)
    models = "Gemma 3 (text)"
    defaults = DEFAULTS | {"max_position_embeddings": 131072}
    gguf_architecture = "gemma3"
    pattern = 6
    num_layers_of_27b = 62
    has_rope_by_kind = True
    gguf_caps = (None, None)

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(super().complete(spec), qk_norm="head")

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        if config.get("attn_logit_softcapping") is not None:
            config.refuse("attn_logit_softcapping", config.get("attn_logit_softcapping"), "null")
        scaling = config.get("rope_scaling") or {}
        rope = _rope(config, spec, FULL, config.number("rope_theta", GLOBAL_THETA), scaling)
        return super().read_config(config, replace(spec, rope=rope))

    def pattern_of(self, config: Fields) -> int:
        return config.size("sliding_window_pattern", self.pattern)

    def local_rope(self, config: Fields, spec: ModelSpec) -> RopeSpec:
        return _rope(config, spec, SLIDING, config.number("rope_local_base_freq", LOCAL_THETA), {})

    def local_rope_gguf(self, metadata: Fields, spec: ModelSpec) -> RopeSpec:
        return RopeSpec(metadata.number("rope.freq_base_swa", LOCAL_THETA), spec.rope.rotary_dim)


def _rope(
    config: Fields, spec: ModelSpec, kind: str, theta: float, scaling: dict[str, Any]
) -> RopeSpec:
    """What ``rope_parameters`` says of layers of one kind, or ``theta`` and ``scaling``."""
    given = config.get("rope_parameters") or {}
    own = given.get(kind) or {} if isinstance(given, dict) else given
    if not isinstance(own, dict) or not isinstance(scaling, dict):
        config.refuse("rope_parameters", config.get("rope_parameters"), "an object")
    parameters = {"rope_theta": theta, **own, **scaling}
    values = {**config.values, "rope_parameters": parameters}
    return read_rope(Fields(values, config.where), spec.head_dim)


FAMILIES = (Gemma3(),)
