"""Paged attention by Triton kernels: plans a step, launches its kernels.

Uses the default KV layout ``[num_blocks, block_size, num_kv_heads, head_dim]``. On a GPU nothing waits: what
the kernels must know of the batch goes there in one asynchronous copy, once a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import AttentionMetadata, KVScales, LayerKVCache
from .step_memo import StepMemo
from .triton_attention_plan import AttentionPlan, SplitRule, TileShape, plan_attention
from .triton_attention_tile import attention_kernel, merge_kernel
from .triton_gpu import Gpu
from .triton_table import (
    DECODE,
    MERGE_PARTS,
    MERGE_WARPS,
    MIN_SPLIT_KEYS,
    PREFILL,
    PROGRAMS_PER_SM,
    Tile,
    head_pad_for,
    precision_of,
    tile_for,
)

QUERY_TYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_TYPES = (*QUERY_TYPES, torch.float8_e4m3fn)
FP8_BITS_SCALE = 256.0
"""What e4m3 bits count for where they stand in a float16's place: see ``_as`` in the kernel."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One call's shapes and the configurations that follow from them."""

    q: Tensor  # [num_tokens, num_q_heads, head_dim]
    cache: LayerKVCache
    prefill: Tile
    decode: Tile

    @property
    def num_kv_heads(self) -> int:
        return self.cache.key.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    def programs_in(self, tile: Tile) -> int:
        """Programs for one line of the plan."""
        return self.num_kv_heads * -(-self.group // tile_heads(tile, self.group))


def tile_heads(tile: Tile, group: int) -> int:
    """How many of the ``group`` query heads of a KV head one tile holds."""
    return min(group, tile.block_m)


def shape_of(tile: Tile, group: int) -> TileShape:
    """A tile as the plan knows it."""
    return TileShape(tile.block_m // tile_heads(tile, group), tile.block_n)


def split_rule(num_sms: int, programs_per_part: int) -> SplitRule:
    """How decode rows are split on a GPU of ``num_sms``."""
    return SplitRule(MIN_SPLIT_KEYS, -(-PROGRAMS_PER_SM * num_sms // programs_per_part))


class TritonAttention:
    """:meth:`~.ops.Ops.attention` on one GPU."""

    def __init__(self, gpu: Gpu, tiles: Mapping[str, Tile] | None = None) -> None:
        """``tiles``: by phase, instead of the table's."""
        self._gpu = gpu
        self._tiles = tiles or {}
        self._plans: StepMemo[AttentionPlan] = StepMemo()

    def __call__(
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
        """See :meth:`~.ops.Ops.attention`.

        Raises:
            ValueError: the kernels do not take such types or shapes.
        """
        layer = self._layer(q, cache)
        plan = self._plan(layer, metadata, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        partial, lse = _partial_results(plan, out)
        numbers = _numbers(layer, scale, soft_cap, kv_scales, self._gpu)
        for tiles, tile in ((plan.prefill_tiles, layer.prefill), (plan.decode_tiles, layer.decode)):
            if len(tiles):
                attention_kernel[(len(tiles) * layer.programs_in(tile),)](
                    out,
                    partial,
                    lse,
                    q,
                    numbers.key,
                    numbers.value,
                    tiles,
                    metadata.block_tables,
                    sinks,
                    metadata.block_tables.stride(0),
                    q.stride(0),
                    q.stride(1),
                    window or 0,
                    numbers.score_scale,
                    numbers.soft_cap,
                    numbers.value_scale,
                    NUM_KV_HEADS=layer.num_kv_heads,
                    GROUP=layer.group,
                    TILE_HEADS=tile_heads(tile, layer.group),
                    HEAD_DIM=q.shape[2],
                    HEAD_PAD=head_pad_for(q.shape[2]),
                    BLOCK_SIZE=cache.key.shape[1],
                    BLOCK_M=tile.block_m,
                    BLOCK_N=tile.block_n,
                    HAS_WINDOW=window is not None,
                    HAS_SOFT_CAP=soft_cap is not None,
                    HAS_SINKS=sinks is not None,
                    IS_FP8_BITS=numbers.is_fp8_bits,
                    IS_SPLIT=tile is layer.decode,
                    SKIPS_MASKS=tile is layer.prefill,
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    enable_fp_fusion=True,
                )
        if len(plan.merges):
            merge_parts(plan.merges, out, partial, lse)
        return out

    def warm_up(self, q: Tensor, cache: LayerKVCache, **options: object) -> None:
        """Compile all that calls like this one will launch.

        Args:
            q: ``[any, num_q_heads, head_dim]``, of the later calls' strides.
            cache: a layer's; only block 0 is read.
            options: the keywords of a call.
        """
        device, block_size = q.device, cache.key.shape[1]
        tile = self._tile(DECODE, q, cache)
        split_len, prompt_len = 2 * MIN_SPLIT_KEYS, tile.block_m + 1
        width = -(-split_len // block_size)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1, 1 + prompt_len], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([split_len, prompt_len], dtype=torch.int32, device=device),
            block_tables=torch.zeros(2, width, dtype=torch.int32, device=device),
            slot_mapping=torch.full((1 + prompt_len,), -1, device=device),
            query_lens_host=[1, prompt_len],
            seq_lens_host=[split_len, prompt_len],
            max_query_len=prompt_len,
            max_seq_len=split_len,
        )
        tokens = torch.empty_strided(
            (1 + prompt_len, *q.shape[1:]), q.stride(), dtype=q.dtype, device=device
        )
        self(tokens.zero_(), cache, metadata, **options)  # type: ignore[arg-type]

    def forget_plans(self) -> None:
        """The step is over."""
        self._plans.clear()

    def _layer(self, q: Tensor, cache: LayerKVCache) -> _Layer:
        _check(q, cache)
        prefill, decode = (self._tile(phase, q, cache) for phase in (PREFILL, DECODE))
        return _Layer(q, cache, prefill, decode)

    def _tile(self, phase: str, q: Tensor, cache: LayerKVCache) -> Tile:
        if phase in self._tiles:
            return self._tiles[phase]
        precision = precision_of(q.dtype, cache.key.dtype)
        return tile_for(self._gpu.arch, phase, q.shape[2], precision)

    def _plan(
        self, layer: _Layer, metadata: AttentionMetadata, window: int | None
    ) -> AttentionPlan:
        prefill, decode = (shape_of(tile, layer.group) for tile in (layer.prefill, layer.decode))
        split = split_rule(self._gpu.num_sms, layer.programs_in(layer.decode))
        return self._plans.get(
            (metadata.seq_lens,),  # which the groups of a step share
            (prefill, decode, split, window),
            lambda: plan_attention(
                metadata.query_lens_host,
                metadata.seq_lens_host,
                prefill=prefill,
                decode=decode,
                split=split,
                window=window,
                device=metadata.block_tables.device,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The cache as the kernel takes it, and the scales that go with that."""

    key: Tensor
    value: Tensor
    is_fp8_bits: bool
    score_scale: float
    soft_cap: float
    value_scale: float


def _numbers(
    layer: _Layer, scale: float, soft_cap: float | None, kv_scales: KVScales | None, gpu: Gpu
) -> _Numbers:
    key, value = layer.cache
    key_scale, value_scale = kv_scales or KVScales(1.0, 1.0)
    is_fp8_bits = key.dtype == torch.float8_e4m3fn and not gpu.arch.converts_fp8
    if is_fp8_bits:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
        key_scale, value_scale = key_scale * FP8_BITS_SCALE, value_scale * FP8_BITS_SCALE
    unit = LOG2_E if soft_cap is None else 1 / soft_cap
    return _Numbers(
        key,
        value,
        is_fp8_bits,
        score_scale=scale * key_scale * unit,
        soft_cap=(soft_cap or 0.0) * LOG2_E,
        value_scale=value_scale,
    )


def _partial_results(plan: AttentionPlan, out: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what the parts of split rows give: outputs and log-sum-exps, float32."""
    shape = (plan.num_partial_rows, *out.shape[1:])
    partial = torch.empty(shape, dtype=torch.float32, device=out.device)
    return partial, torch.empty(shape[:2], dtype=torch.float32, device=out.device)


def merge_parts(merges: Tensor, out: Tensor, partial: Tensor, lse: Tensor) -> None:
    """Write the rows of ``out`` that ``merges`` names, from what their parts gave."""
    _, num_q_heads, head_dim = out.shape
    merge_kernel[(len(merges) * num_q_heads,)](
        out,
        partial,
        lse,
        merges,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad_for(head_dim),
        NUM_PARTS=MERGE_PARTS,
        num_warps=MERGE_WARPS,
        enable_fp_fusion=True,
    )


def _check(q: Tensor, cache: LayerKVCache) -> None:
    key, value = cache
    if q.dtype not in QUERY_TYPES:
        raise ValueError(f"The Triton kernels do not take {q.dtype} queries.")
    if key.dtype not in CACHE_TYPES or value.dtype != key.dtype:
        raise ValueError(f"The Triton kernels do not take {key.dtype} keys, {value.dtype} values.")
    if key.shape != value.shape or q.shape[2] != key.shape[3] or q.shape[1] % key.shape[2]:
        raise ValueError(
            f"Queries {tuple(q.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} "
            "do not go together."
        )
    if q.stride(2) != 1 or not key.is_contiguous() or not value.is_contiguous():
        raise ValueError(
            "The Triton kernels need contiguous blocks, and query heads that are contiguous."
        )
