"""OLMo 2 (OLMo team, 2025, arXiv 2501.00656)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.spec import ModelSpec
from ..family import Family


class Olmo2(Family):
    """Llama with norms after attention and feed-forward, not before, and one over all heads of q and k."""

    architectures = ("Olmo2ForCausalLM",)
    models = "OLMo 2"
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    gguf_architecture = "olmo2"

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, norms="post", qk_norm="token")

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        has_bias = config.flag("attention_bias")
        spec = replace(spec, attention_bias=has_bias, attention_out_bias=has_bias)
        return self.complete(spec)

    def accepts_gguf(self, metadata: Fields) -> bool:
        """OLMo 3 files go by this name too; they have windows."""
        return metadata.size_or_none("attention.sliding_window") is None


FAMILIES = (Olmo2(),)
