"""Phi-3 (Abdin et al., 2024, arXiv 2404.14219) and Phi-4."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.fields import Fields
from ...checkpoint.hf_config import read_window
from ...checkpoint.spec import ModelSpec
from ..family import Family


class Phi3(Family):
    """Llama whose q, k, v are one tensor, and gate and up another; partial rotary and long rope."""

    architectures = ("Phi3ForCausalLM",)
    models = "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"
    defaults = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    gguf_architecture = "phi3"
    has_partial_rotary = True

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, has_fused_tensors=True)

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        return self.complete(replace(spec, sliding_window=read_window(config)))

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        window = metadata.size_or_none("attention.sliding_window")
        return self.complete(replace(spec, sliding_window=window))


FAMILIES = (Phi3(),)
