"""Layers that model files share."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.ops import Ops, QuantizedRows
from ..checkpoint.spec import ModelSpec
from ..errors import CheckpointError
from .weights import Weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Linear:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``; packed once by the op set."""

    def __init__(
        self, ops: Ops, weight: Tensor | QuantizedRows, bias: Tensor | None = None
    ) -> None:
        self._ops = ops
        self._packed = ops.pack_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._packed)


def fused_linear(weights: Weights, ops: Ops, module: str, *names: str) -> Linear:
    """The linear layers ``module.name`` over the same input as one; biases where they exist."""
    weight = weights.read_linear(f"{module}.{name}.weight" for name in names)
    if f"{module}.{names[0]}.bias" not in weights:
        return Linear(ops, weight)
    return Linear(ops, weight, weights.read_rows(f"{module}.{name}.bias" for name in names))


def read_embedding(spec: ModelSpec, weights: Weights) -> Tensor:
    """``[vocab_size, hidden_size]``.

    Raises:
        CheckpointError: it is tied to the head, yet the checkpoint holds a head that differs.
    """
    embedding = weights.read(EMBEDDING)
    if not spec.tie_word_embeddings or HEAD not in weights:
        return embedding
    if not torch.equal(weights.read(HEAD), embedding):
        raise CheckpointError(
            f"{weights.path} ties {HEAD} to {EMBEDDING}, yet holds one that differs."
        )
    return embedding


def read_head(spec: ModelSpec, weights: Weights, embedding: Tensor) -> Tensor | QuantizedRows:
    """The output projection, ``[vocab_size, hidden_size]``; the embedding itself if it is tied to it."""
    if not spec.tie_word_embeddings:
        return weights.read_linear([HEAD])
    return weights.read_linear([EMBEDDING]) if weights.keeps_blocks(EMBEDDING) else embedding
