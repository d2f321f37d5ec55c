"""Seed-OSS (ByteDance Seed, 2025)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.spec import ModelSpec
from ..family import Family


class SeedOss(Family):
    """Llama with biases on q, k and v, and, by a key of its own, on the output of attention."""

    architectures = ("SeedOssForCausalLM",)
    models = "Seed-OSS 36B"
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    }

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        return replace(
            spec,
            attention_bias=config.flag("attention_bias"),
            attention_out_bias=config.flag("attention_out_bias"),
            mlp_bias=config.flag("mlp_bias"),
        )


FAMILIES = (SeedOss(),)
