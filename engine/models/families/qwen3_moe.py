"""Qwen3 with experts (Yang et al., 2025, arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.experts import read_gguf_experts, with_experts
from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import read_window
from ...checkpoint.spec import ExpertSpec, ModelSpec
from ..family import Family


class Qwen3Moe(Family):
    """Qwen3 with mixtures of experts, in all layers or in some."""

    architectures = ("Qwen3MoeForCausalLM",)
    models = "Qwen3 30B-A3B and 235B-A22B"
    defaults = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    }
    gguf_architecture = "qwen3moe"

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, qk_norm="head")

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        """Hub files say ``num_experts``, and transformers 5 writes ``num_local_experts``."""
        experts = ExpertSpec(
            num_experts=config.size("num_experts", config.size("num_local_experts", 128)),
            top_k=config.size("num_experts_per_tok"),
            intermediate_size=config.size("moe_intermediate_size"),
            renormalise=config.flag("norm_topk_prob"),
        )
        has_bias, has_window = config.flag("attention_bias"), config.flag("use_sliding_window")
        spec = replace(
            spec,
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            sliding_window=read_window(config) if has_window else None,
        )
        return self.complete(with_experts(spec, experts, _dense_layers(config, spec.num_layers)))

    def accepts_gguf(self, metadata: Fields) -> bool:
        return True

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        experts = read_gguf_experts(metadata, spec, renormalise=True)
        return self.complete(with_experts(spec, experts))


def _dense_layers(config: Fields, num_layers: int) -> set[int]:
    """Those that are named, and all that are not the last of ``decoder_sparse_step``."""
    step = config.size("decoder_sparse_step")
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
        config.refuse("mlp_only_layers", named, "a list of layers")
    return {*named, *(index for index in range(num_layers) if (index + 1) % step)}


FAMILIES = (Qwen3Moe(),)
