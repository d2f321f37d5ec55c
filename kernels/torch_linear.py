"""Linear layers whose weights are packed once for the processor (oneDNN), where that is possible."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_BATCH_HINT = 32  # oneDNN wants an expected number of rows; 1, 32 and 256 measure the same


class PackedLinear(NamedTuple):
    """A linear layer ready to be applied."""

    weight: Tensor  # [out_features, in_features]; opaque where is_packed
    bias: Tensor | None  # [out_features]
    is_packed: bool


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Prepare ``weight [out_features, in_features]``; packs it if :func:`can_pack`."""
    if not can_pack(weight):
        return PackedLinear(weight, bias, is_packed=False)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BATCH_HINT)
    return PackedLinear(packed, bias, is_packed=True)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a fast product for this weight's device, type and shape."""
    if weight.device.type != "cpu" or weight.numel() == 0:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``."""
    if packed.is_packed:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, packed.weight, packed.bias, "none", [], ""
        )
        return y
    return functional.linear(x, packed.weight, packed.bias)


def pack_head(weight: Tensor) -> PackedLinear:
    """Prepare ``weight [vocab_size, hidden_size]`` for :func:`logits`.

    No CPU product of PyTorch takes bfloat16 and gives float32, so there the weight is kept in float32.
    """
    on_cpu = weight.device.type == "cpu"
    return pack_linear(weight.float() if on_cpu else weight, None)


def logits(x: Tensor, packed: PackedLinear) -> Tensor:
    """``x [num_rows, hidden_size]`` → ``[num_rows, vocab_size]`` float32."""
    if x.device.type == "cpu" or x.dtype == torch.float32:
        return linear(x.float(), packed)
    if torch.version.hip:  # its product cannot widen what it returns
        return functional.linear(x.float(), packed.weight.float())
    return torch.mm(x, packed.weight.t(), out_dtype=torch.float32)
