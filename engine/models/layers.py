"""Layers that model files share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import Ops, QuantizedRows
from ..checkpoint.spec import ModelSpec
from ..errors import CheckpointError
from .shapes import EMBEDDING, HEAD
from .weights import Weights


class Linear:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``; packed once by the op set."""

    def __init__(
        self, ops: Ops, weight: Tensor | QuantizedRows, bias: Tensor | None = None
    ) -> None:
        self._ops = ops
        self._packed = ops.pack_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._packed)


class Norm(Protocol):
    """A norm of hidden states ``[num_tokens, hidden_size]``."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum; ``residual`` may be overwritten."""


class RMSNorm:
    """Implements :class:`Norm`."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._weight = ops.pack_vector(weight)  # [hidden_size]
        self._ops = ops
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """Implements :class:`Norm`."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = ops.pack_vector(weight)  # [hidden_size]
        self._bias = ops.pack_vector(bias)  # [hidden_size]
        self._ops = ops
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.add_layer_norm(x, residual, self._weight, self._bias, self._eps)


def norm_of(spec: ModelSpec, weights: Weights, ops: Ops, module: str) -> Norm:
    """The norm called ``module``, of the model's kind."""
    weight = read_norm(spec, weights, module)
    if spec.norm_kind == "rms":
        return RMSNorm(ops, weight, spec.rms_norm_eps)
    return LayerNorm(ops, weight, weights.read(f"{module}.bias"), spec.rms_norm_eps)


def read_norm(spec: ModelSpec, weights: Weights, module: str) -> Tensor:
    """A norm's weight. A sum with an offset stays float32, as its digits matter."""
    weight = weights.read(f"{module}.weight")
    return weight.float() + spec.norm_offset if spec.norm_offset else weight


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
