"""Paged keys and values over ``cpu_attention.cpp``: their memory, writes to it, attention over it, moves of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cpu_calls import FLOAT_TYPES, address_of, require
from .cpu_elementwise import ElementwiseOps
from .cpu_structs import AttentionArgs, StoreKVArgs
from .kv_store import move_blocks, untouched_zeros
from .ops import AttentionMetadata, KVCacheSpec, KVScales, LayerKVCache, refuse_extras


class AttentionOps(ElementwiseOps):
    """The ops of the KV cache; contracts in :class:`~.ops.Ops`. Owns the cache's layout."""

    def allocate_kv_cache(self, spec: KVCacheSpec, device: torch.device) -> LayerKVCache:
        """Keys ``[num_blocks, num_kv_heads, key_steps, block_size, per_word]``, values ``[num_blocks,
        num_kv_heads, value_steps, head_dim, per_word]``; see cpu_kv.h."""
        per_word = 4 // spec.dtype.itemsize
        heads, size, dim = spec.num_kv_heads, spec.block_size, spec.head_dim
        key_shape = (spec.num_blocks, heads, -(-dim // per_word), size, per_word)
        value_shape = (spec.num_blocks, heads, -(-size // per_word), dim, per_word)
        return LayerKVCache(
            untouched_zeros(key_shape, spec.dtype), untouched_zeros(value_shape, spec.dtype)
        )

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
    ) -> None:
        """Write keys and values to their slots.

        Args:
            k: ``[num_tokens, num_kv_heads, head_dim]`` float32.
            v: as ``k``; while ops are recorded, with its strides.
            cache: from :meth:`allocate_kv_cache`.
            slot_mapping: ``[num_tokens]`` int64; -1: do not store.

        Raises:
            ValueError: shapes do not fit, there are ``kv_scales``, or strides differ in a recording.
        """
        refuse_extras(self.name, None, kv_scales)
        _require_cache(cache, k.shape[1:], f"keys of {tuple(k.shape[1:])}")
        if k.stride() != v.stride():
            require(self._recording is None, "keys and values that lie differently, recorded")
            k, v = k.contiguous(), v.contiguous()
        self._do(
            StoreKVArgs(
                num_tokens=self._tokens(k),
                k=address_of(k),
                v=address_of(v),
                token_stride=k.stride(0),
                head_stride=k.stride(1),
                slots=slot_mapping.data_ptr(),
                key=cache.key.data_ptr(),
                value=cache.value.data_ptr(),
                dtype=FLOAT_TYPES[cache.key.dtype],
                block_size=cache.key.shape[3],
                num_kv_heads=cache.key.shape[1],
                head_dim=cache.value.shape[3],
            )
        )

    def rotary_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Norm if asked for, :meth:`rotary`, then :meth:`store_kv`: each an op of its own.

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]`` float32, overwritten.
            k: ``[num_tokens, num_kv_heads, head_dim]`` float32, overwritten.
            v: as ``k``, and left as it is.
            positions: ``[num_tokens]`` int64.
            cos_sin: ``[max_position, rotary_dim]`` float32.
            slot_mapping: ``[num_tokens]`` int64.
            q_norm: ``[head_dim]`` float32, with ``k_norm``.

        Returns:
            The turned queries, which are ``q``.

        Raises:
            ValueError: shapes do not fit, or there are ``kv_scales``.
        """
        if q_norm is not None and k_norm is not None:
            q, k = self.qk_norm(q, k, q_norm, k_norm, eps)
        q, k = self.rotary(q, k, positions, cos_sin)
        self.store_kv(k, v, cache, slot_mapping, kv_scales)
        return q

    def attention(
        self,
        q: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        """``q [num_tokens, num_q_heads, head_dim]`` float32 over the cache → the same shape, float32.

        Raises:
            ValueError: shapes do not fit, or there are ``sinks`` or ``kv_scales``.
        """
        refuse_extras(self.name, sinks, kv_scales)
        num_kv_heads = cache.key.shape[1]
        require(q.shape[1] % num_kv_heads == 0, f"{q.shape[1]} heads over {num_kv_heads}")
        _require_cache(cache, (num_kv_heads, q.shape[2]), f"queries of {q.shape[2]}")
        out = self._empty(q.shape)
        cells = self._rows_of(metadata)
        self._do(
            AttentionArgs(
                num_rows=cells.num_rows,
                query_start_loc=metadata.query_start_loc.data_ptr(),
                seq_lens=metadata.seq_lens.data_ptr(),
                block_tables=metadata.block_tables.data_ptr(),
                table_stride=cells.table_stride,
                q=address_of(q),
                q_token_stride=q.stride(0),
                q_head_stride=q.stride(1),
                key=cache.key.data_ptr(),
                value=cache.value.data_ptr(),
                dtype=FLOAT_TYPES[cache.key.dtype],
                block_size=cache.key.shape[3],
                num_q_heads=q.shape[1],
                num_kv_heads=num_kv_heads,
                head_dim=q.shape[2],
                scale=scale,
                window=window or 0,
                soft_cap=soft_cap or 0.0,
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def copy_blocks(self, caches: Sequence[LayerKVCache], src: Tensor, dst: Tensor) -> None:
        for cache in caches:
            for tensor in cache:
                move_blocks(tensor, tensor, src, dst)

    def swap_blocks(
        self,
        src_caches: Sequence[LayerKVCache],
        dst_caches: Sequence[LayerKVCache],
        src: Tensor,
        dst: Tensor,
    ) -> None:
        for source_cache, target_cache in zip(src_caches, dst_caches, strict=True):
            for source, target in zip(source_cache, target_cache, strict=True):
                move_blocks(source, target, src, dst)


def _require_cache(cache: LayerKVCache, heads: Sequence[int], what: str) -> None:
    """``heads``: heads and numbers of each, of what is stored or looked for."""
    stored = (cache.value.shape[1], cache.value.shape[3])
    require(stored == tuple(heads), f"{what} with a cache of {stored}")
