"""Qwen3 (Yang et al., 2025, arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.spec import ModelSpec
from ..family import Family
from .qwen2 import DEFAULTS, with_upper_windows


class Qwen3(Family):
    """Llama with an RMS norm on each head's query and key."""

    architectures = ("Qwen3ForCausalLM",)
    models = "Qwen3"
    defaults = DEFAULTS | {"head_dim": 128}
    gguf_architecture = "qwen3"

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, qk_norm="head")

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        has_bias = config.flag("attention_bias")
        spec = replace(spec, attention_bias=has_bias, attention_out_bias=has_bias)
        return self.complete(with_upper_windows(config, spec))


FAMILIES = (Qwen3(),)
