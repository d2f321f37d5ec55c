"""A transformers model as the runner wants one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache
from ...checkpoint.spec import ModelSpec
from .attention import PagedAttention
from .layers import GivenHidden


class Parts(NamedTuple):
    """A decoder of transformers, taken apart."""

    base: nn.Module  # from token ids to the states that the head takes
    causal: nn.Module  # the class with the head, over `given` in the place of `base`
    given: GivenHidden
    attention: PagedAttention  # of base's layers


class TransformersModel:
    """Implements :class:`~..model.Model` with a class of transformers.

    Args:
        spec: what the model's own attention calls say of its layers.
        dtype: of keys and values.
    """

    is_recordable = False

    def __init__(
        self,
        spec: ModelSpec,
        parts: Parts,
        *,
        dtype: torch.dtype,
        num_parameters: int,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.num_parameters = num_parameters
        self._parts = parts

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    def kv_cache_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        heads, dim = self.spec.num_kv_heads, self.spec.head_dim
        return KVCacheSpec(num_blocks, block_size, heads, dim, self.dtype)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        with self._parts.attention.step(kv_caches, metadata):
            return run(self._parts.base, token_ids, positions)

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        given, causal = self._parts.given, self._parts.causal
        given.hidden = hidden[None]
        try:
            logits: Tensor = causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            given.hidden = torch.empty(0)
        return logits.float()


def run(base: nn.Module, token_ids: Tensor, positions: Tensor) -> Tensor:
    """A flat batch, ``[num_tokens]`` each, as one row → ``[num_tokens, hidden_size]``."""
    hidden: Tensor = base(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False
    ).last_hidden_state[0]
    return hidden
