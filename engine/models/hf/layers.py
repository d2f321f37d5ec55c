"""Modules that stand in for those of a transformers model: octavo's ops in their places.

Products by octavo's ops give a row the same bits in any company, and are faster on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from ....kernels.ops import Ops


class PackedLinear(nn.Module):
    """``nn.Linear``, or GPT-2's ``Conv1D``, with a packed weight."""

    def __init__(self, linear: nn.Module, ops: Ops) -> None:
        super().__init__()
        weight: Any = linear.weight.data  # [out_features, in_features]
        if isinstance(linear, Conv1D):
            weight = weight.T.contiguous()
        self.out_features, self.in_features = weight.shape
        self.packed = ops.pack_linear(weight, _bias(linear))
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        rows = x.reshape(-1, self.in_features)
        return self.ops.linear(rows, self.packed).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """``nn.Embedding``, whose result has the type that the op set computes in."""

    def __init__(self, embedding: nn.Embedding, ops: Ops) -> None:
        super().__init__()
        self.table = (
            embedding.weight.data
        )  # no parameter: it keeps its type when the others are cast
        self.ops = ops

    def forward(self, ids: Tensor) -> Tensor:  # [...] int64 -> [..., size]
        return self.ops.embed(ids.flatten(), self.table).view(*ids.shape, self.table.shape[1])


class PackedHead(nn.Module):
    """The output embeddings; its logits are float32."""

    def __init__(self, head: nn.Linear, ops: Ops) -> None:
        super().__init__()
        self.bias = _bias(head)
        self.packed = ops.pack_head(head.weight.data)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> [..., vocab_size] float32
        logits = self.ops.logits(x.reshape(-1, x.shape[-1]), self.packed)
        if self.bias is not None:
            logits = logits + self.bias
        return logits.view(*x.shape[:-1], logits.shape[-1])


@dataclass
class States(MoeModelOutputWithPast):
    """With the fields of every kind of output that a class with a head looks at."""

    cross_attentions: Any = None


class GivenHidden(nn.Module):
    """Stands in for the layers below a head: the class with the head does with given hidden states what it
    does with its own, scaling and soft caps included."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)  # [1, num_rows, hidden_size]

    @property
    def decoder(self) -> GivenHidden:  # OPT's class with the head reaches through its model
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> States:
        return States(last_hidden_state=self.hidden)


def _bias(linear: Any) -> Tensor | None:
    """``[out_features]``, if there is one."""
    return None if linear.bias is None else linear.bias.data


def pack(model: nn.Module, ops: Ops, dtype: torch.dtype, head: nn.Module) -> None:
    """Put octavo's ops in the places of all plain linear layers and embeddings but ``head``.

    Args:
        dtype: of the weights. What remains the model's own is cast to what the op set computes in.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is head:
                continue
            if type(child) in (nn.Linear, Conv1D) and child.weight.dtype == dtype:
                setattr(module, name, PackedLinear(child, ops))
            elif type(child) is nn.Embedding and child.weight.dtype == dtype:
                setattr(module, name, PackedEmbedding(child, ops))
    computed = activation_dtype(ops, dtype)
    if computed != dtype:  # else what a class keeps wider than its weights stays so
        model.to(computed)


def activation_dtype(ops: Ops, dtype: torch.dtype) -> torch.dtype:
    """The type in which an op set computes with weights of ``dtype``."""
    return ops.embed(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64, dtype=dtype)).dtype
