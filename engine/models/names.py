"""Names of tensors: octavo's, which are those of transformers' Llama, and other files'."""

from __future__ import annotations

import re
from collections.abc import Mapping

EXPERT_MODULE = re.compile(r"(?P<before>.+\.experts\.)(?P<expert>\d+)(?P<after>\..+)")
LAYER_NAME = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>[^.]+)")

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{expert}.gate_proj": "ffn_gate_exps[{expert}]",
    "mlp.experts.{expert}.up_proj": "ffn_up_exps[{expert}]",
    "mlp.experts.{expert}.down_proj": "ffn_down_exps[{expert}]",
}
"""Of GGUF files, with ``blk.N.`` before those of a layer. ``[N]``: matrix N of a tensor of matrices."""

GGUF_NORMS = {
    "pre": {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    "post": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "both": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
"""By ``ModelSpec.norms``."""


def rename(name: str, names: Mapping[str, str], prefix: str) -> str:
    """``name`` with its module called otherwise.

    Args:
        names: module names, of a layer without the layer; what is not here stays. A new name with
            ``{layer}`` is whole, others get ``prefix`` in a layer. ``{expert}`` in both is any number.
        prefix: of a layer's tensors, with ``{layer}``.
    """
    match = LAYER_NAME.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        return f"{names.get(module, module)}.{kind}"
    module = match["module"]
    expert = EXPERT_MODULE.fullmatch(module)
    key = module if expert is None else f"{expert['before']}{{expert}}{expert['after']}"
    new = names.get(key, module)
    whole = new if "{layer}" in new else prefix + new
    index = None if expert is None else expert["expert"]
    return f"{whole.format(layer=match['layer'], expert=index)}.{match['kind']}"
