"""GPT-NeoX (Black et al., 2022, arXiv 2204.06745) and Pythia (Biderman et al., 2023, arXiv 2304.01373)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...checkpoint.fields import Fields
from ...checkpoint.rope_config import read_rope
from ...checkpoint.spec import ModelSpec
from ..family import Family

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "gpt_neox.layers.{layer}."
ACTIVATIONS = {  # transformers' names of the two functions
    "gelu": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}


class GPTNeoX(Family):
    """Layer norms with biases, partial rotary, no gate; attention and feed-forward in parallel, or not."""

    architectures = ("GPTNeoXForCausalLM",)
    models = "GPT-NeoX, Pythia"
    defaults = {
        "max_position_embeddings": 2048,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_act": "gelu",
    }
    names = {
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "input_layernorm": LAYER + "input_layernorm",
        "post_attention_layernorm": LAYER + "post_attention_layernorm",
        "self_attn.qkv_proj": LAYER + "attention.query_key_value",
        "self_attn.o_proj": LAYER + "attention.dense",
        "mlp.up_proj": LAYER + "mlp.dense_h_to_4h",
        "mlp.down_proj": LAYER + "mlp.dense_4h_to_h",
    }
    gguf_architecture = "gptneox"
    has_partial_rotary = True

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(
            spec,
            num_kv_heads=spec.num_q_heads,
            has_fused_tensors=True,
            has_gate=False,
            mlp_bias=True,
            norm_kind="layer",
        )

    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        values = {
            "rope_theta": config.get("rotary_emb_base"),
            "partial_rotary_factor": config.number("rotary_pct", 0.25),
            **{key: value for key, value in config.values.items() if value is not None},
        }
        has_bias = config.flag("attention_bias")
        spec = replace(
            spec,
            rope=read_rope(Fields(values, config.where), spec.head_dim),
            rms_norm_eps=config.number("layer_norm_eps", 1e-5),
            hidden_act=ACTIVATIONS.get(spec.hidden_act, spec.hidden_act),
            attention_bias=has_bias,
            attention_out_bias=has_bias,
            is_parallel=config.flag("use_parallel_residual"),
        )
        return self.complete(spec)

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        is_parallel = metadata.flag("use_parallel_residual", True)
        return self.complete(replace(spec, hidden_act="gelu", is_parallel=is_parallel))

    def is_ignored(self, spec: ModelSpec, name: str) -> bool:
        """Old files hold masks, too."""
        is_mask = name.endswith((".attention.bias", ".attention.masked_bias"))
        return is_mask or super().is_ignored(spec, name)

    def arrange(self, spec: ModelSpec, name: str, rows: Tensor) -> Tensor:
        """Folders hold q, k and v of each head side by side."""
        if ".qkv_proj." not in name:
            return rows
        heads = rows.view(spec.num_q_heads, 3, spec.head_dim, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)


FAMILIES = (GPTNeoX(),)
