"""What every model offers to the runner. A model takes everything as arguments and keeps only weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ...kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache
from ..checkpoint.spec import ModelSpec


class Model(Protocol):
    """A decoder-only language model over paged keys and values."""

    spec: ModelSpec
    num_parameters: int

    @property
    def is_recordable(self) -> bool:
        """Whether :meth:`forward` is made of ops alone, so that :meth:`Ops.record_step` may replay it."""

    @property
    def num_layers(self) -> int: ...

    def kv_cache_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        """The KV cache of one layer; all layers are alike."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute a flat batch and store its keys and values.

        Args:
            token_ids: ``[num_tokens]`` int64.
            positions: ``[num_tokens]`` int64, index of each token in its sequence.
            kv_caches: one per layer.
            metadata: the rows of the batch, one per layer; layers of a KV group have the same.

        Returns:
            ``[num_tokens, hidden_size]`` after the final norm, in the weights' dtype.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [num_rows, hidden_size]`` → ``[num_rows, vocab_size]`` float32."""

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        """Each row's most likely token, -1 where the logits are not finite → ``[num_rows]`` int64.

        ``None``: the model has no shorter way to it than :meth:`logits`, which gives the same.
        """
