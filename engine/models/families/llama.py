"""Llama (Touvron et al., 2023, arXiv 2307.09288), and Mistral (Jiang et al., 2023, arXiv 2310.06825),
which adds a sliding window.
"""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import read_window
from ...checkpoint.spec import ModelSpec
from ..family import Family


class Llama(Family):
    """RMS norm, rotary embedding, grouped-query attention, gated feed-forward."""

    architectures = ("LlamaForCausalLM",)
    models = "Llama 2 and 3, TinyLlama, SmolLM2"
    defaults = {"max_position_embeddings": 2048}
    gguf_architecture = "llama"
    has_gguf_pairs = True

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        has_bias = config.flag("attention_bias")
        return replace(
            spec,
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            mlp_bias=config.flag("mlp_bias"),
        )

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        """Files of Mistral go by Llama's name."""
        return replace(spec, sliding_window=metadata.size_or_none("attention.sliding_window"))


class Mistral(Family):
    """Llama whose attention sees a window of the tokens before."""

    architectures = ("MistralForCausalLM",)
    models = "Mistral 7B"
    defaults = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        """A window of null turns it off."""
        return replace(spec, sliding_window=read_window(config))


FAMILIES = (Llama(), Mistral())
