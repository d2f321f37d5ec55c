"""OLMoE (Muennighoff et al., 2024, arXiv 2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.experts import read_gguf_experts, with_experts
from ...checkpoint.fields import Fields
from ...checkpoint.spec import ExpertSpec, ModelSpec
from ..family import Family


class Olmoe(Family):
    """Llama with mixtures of experts, and an RMS norm on all of a token's queries, and on its keys."""

    architectures = ("OlmoeForCausalLM",)
    models = "OLMoE 1B-7B"
    defaults = {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    }
    gguf_architecture = "olmoe"

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, qk_norm="token")

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        experts = ExpertSpec(
            num_experts=config.size("num_experts"),
            top_k=config.size("num_experts_per_tok"),
            intermediate_size=spec.intermediate_size,
            renormalise=config.flag("norm_topk_prob"),
        )
        has_bias, has_limit = config.flag("attention_bias"), config.get("clip_qkv") is not None
        spec = replace(
            spec,
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            qkv_limit=config.number("clip_qkv") if has_limit else None,
        )
        return self.complete(with_experts(spec, experts))

    def accepts_gguf(self, metadata: Fields) -> bool:
        return True

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        """The format has no place for ``clip_qkv`` in this architecture; OLMoE 1B-7B does not use it."""
        experts = read_gguf_experts(metadata, spec, renormalise=False)
        return self.complete(with_experts(spec, experts))


FAMILIES = (Olmoe(),)
