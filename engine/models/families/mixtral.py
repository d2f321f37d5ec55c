"""Mixtral (Jiang et al., 2024, arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.experts import read_gguf_experts, with_experts
from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import read_window
from ...checkpoint.spec import ExpertSpec, ModelSpec
from ..family import Family


class Mixtral(Family):
    """Mistral with a mixture of experts for each feed-forward; the weights of a token's experts add up to 1."""

    architectures = ("MixtralForCausalLM",)
    models = "Mixtral 8x7B and 8x22B"
    defaults = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    names = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.{expert}.gate_proj": "block_sparse_moe.experts.{expert}.w1",
        "mlp.experts.{expert}.up_proj": "block_sparse_moe.experts.{expert}.w3",
        "mlp.experts.{expert}.down_proj": "block_sparse_moe.experts.{expert}.w2",
    }
    gguf_architecture = "llama"
    has_gguf_pairs = True

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        experts = ExpertSpec(
            num_experts=config.size("num_local_experts"),
            top_k=config.size("num_experts_per_tok"),
            intermediate_size=spec.intermediate_size,
            renormalise=True,
        )
        return with_experts(replace(spec, sliding_window=read_window(config)), experts)

    def accepts_gguf(self, metadata: Fields) -> bool:
        return metadata.size_or_none("expert_count") is not None

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        window = metadata.size_or_none("attention.sliding_window")
        experts = read_gguf_experts(metadata, spec, renormalise=True)
        return with_experts(replace(spec, sliding_window=window), experts)


FAMILIES = (Mixtral(),)
