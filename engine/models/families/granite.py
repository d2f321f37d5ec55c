"""Granite 3 (IBM, 2024)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.spec import ModelSpec
from ..family import Family


class Granite(Family):
    """Llama with multipliers: of embeddings, of what layers add, of scores and of logits."""

    architectures = ("GraniteForCausalLM",)
    models = "Granite 3"
    defaults = {"max_position_embeddings": 2048, "attention_multiplier": 1.0}
    gguf_architecture = "granite"
    has_gguf_pairs = True

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        has_bias = config.flag("attention_bias")
        return replace(
            spec,
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            mlp_bias=config.flag("mlp_bias"),
            embedding_scale=config.number("embedding_multiplier", 1.0),
            residual_scale=config.number("residual_multiplier", 1.0),
            attention_scale=config.number("attention_multiplier"),
            logits_scale=1 / config.number("logits_scaling", 1.0),
        )

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        scale = metadata.get("attention.scale")
        return replace(
            spec,
            embedding_scale=metadata.number("embedding_scale", 1.0),
            residual_scale=metadata.number("residual_scale", 1.0),
            attention_scale=None if scale is None else metadata.number("attention.scale"),
            logits_scale=1 / metadata.number("logit_scale", 1.0),
        )


FAMILIES = (Granite(),)
