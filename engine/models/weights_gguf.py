"""Weights of a GGUF file of the ``llama`` architecture: names, layout and numbers made transformers'.

llama.cpp rotates neighbouring numbers where transformers rotates halves of a head; its files
therefore hold the rows of q and k in another order, which is undone here.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ...kernels.ops import QuantizedRows
from ..checkpoint.gguf_config import ROPE_FACTORS
from ..checkpoint.gguf_file import GGUFFile
from ..checkpoint.spec import ModelSpec
from .dequantize import QUANTIZED_TYPES, dequantize

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


class GGUFWeights:
    """Implements :class:`~.weights.WeightSource` over one GGUF file."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self.path = file.path
        self.shapes = {
            name: tensor.shape for name, tensor in file.tensors.items() if name != ROPE_FACTORS
        }
        self._file = file
        self._num_heads = {"q_proj": spec.num_q_heads, "k_proj": spec.num_kv_heads}

    def own_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        if match := _LAYER_NAME.fullmatch(module):
            return f"blk.{match[1]}.{_NAMES[match[2]]}.{kind}"
        return f"{_NAMES[module]}.{kind}"

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._file.tensors[self.own_name(name)]
        data = torch.from_numpy(self._file.read(tensor.name))
        values = dequantize(data, tensor.type, dtype).view(tensor.shape)
        num_heads = self._num_heads.get(name.split(".")[-2])
        return values if num_heads is None else unpermute(values, num_heads)

    def load_blocks(self, name: str) -> QuantizedRows | None:
        tensor = self._file.tensors[self.own_name(name)]
        if tensor.type not in QUANTIZED_TYPES:
            return None
        blocks = torch.from_numpy(self._file.read(tensor.name)).view(tensor.shape[0], -1)
        num_heads = self._num_heads.get(name.split(".")[-2])
        if num_heads is not None:
            blocks = unpermute(blocks, num_heads)
        return QuantizedRows(blocks, tensor.type)

    def close(self) -> None:
        """Tensors are mapped one by one, so nothing is held."""


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Put the rows of q or k, ``[num_heads * head_dim, ...]``, from neighbours into halves."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
