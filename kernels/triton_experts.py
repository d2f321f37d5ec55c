"""Mixtures of experts in Triton: routing, and products of rows that are sorted by expert.

A row is a pair of a token and one of its experts. Rows lie sorted by expert; a program computes up to
``BLOCK_M`` neighbours of one expert by ``BLOCK_N`` columns, and finds from the experts' first rows alone which
they are: the grid has room for the worst case, and what is over ends at once. So nothing waits for the host to
know how many rows an expert has. Padding is never loaded or stored.
"""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ops import QuantizedRows, dense
from .triton_experts_table import FEW, MANY, Tile, crowd_of, tile_for
from .triton_gpu import Gpu
from .triton_product import product

TYPES = (torch.float32, torch.bfloat16, torch.float16)
COMBINE_BLOCK = 1024


class TritonExperts(NamedTuple):
    """One layer's experts."""

    gate_up: Tensor  # [num_experts, 2 * mlp, hidden]
    down: Tensor  # [num_experts, hidden, mlp]


@triton.jit
def route_kernel(
    logits_ptr,  # [num_tokens, NUM_EXPERTS], rows logits_stride apart
    ids_ptr,  # [num_tokens, TOP_K] int32
    weights_ptr,  # [num_tokens, TOP_K] float32
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,  # the next power of two
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,  # likewise
    RENORMALISE: tl.constexpr,
):
    """One token's experts, by descending logit, the lowest id where two are equal."""
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, PADDED_EXPERTS)
    place = logits_ptr + token * logits_stride + ids
    logits = tl.load(place, mask=ids < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    # NaN is chosen last, and spoils the weights.
    left = tl.where(logits == logits, logits, float("-inf"))
    exponentials = tl.exp(logits - tl.max(left, 0))
    places = tl.arange(0, PADDED_K)
    chosen = tl.zeros([PADDED_K], tl.int32)
    weights = tl.zeros([PADDED_K], tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.argmax(left, 0, tie_break_left=True)
        is_this = ids == expert
        chosen = tl.where(places == k, expert, chosen)
        weights = tl.where(places == k, tl.sum(tl.where(is_this, exponentials, 0.0), 0), weights)
        left = tl.where(is_this, float("-inf"), left)
    if RENORMALISE:
        total = tl.sum(weights, 0)
    else:
        total = tl.sum(exponentials, 0)
    cells = token * TOP_K + places
    tl.store(ids_ptr + cells, chosen, mask=places < TOP_K)
    tl.store(weights_ptr + cells, weights / total, mask=places < TOP_K)


@triton.jit
def experts_kernel(
    x_ptr,  # [num_x_rows, IN], rows x_stride apart
    weight_ptr,  # [NUM_EXPERTS, OUT, IN]; where IS_GATED, [NUM_EXPERTS, 2 * OUT, IN]: gate, then up
    out_ptr,  # [num_rows, OUT]
    starts_ptr,  # [NUM_EXPERTS + 1] int32: first row of each expert, and the end
    pairs_ptr,  # [num_rows] int64: which of the pairs, sorted by token, a row is
    x_stride,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,  # the next power of two
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    IS_GATED: tl.constexpr,  # silu(gate) * up of tokens, in rows; else a product of rows, in pairs
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, first, end = _find_rows(
        starts_ptr, tl.program_id(0), NUM_EXPERTS, PADDED_EXPERTS, BLOCK_M
    )
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, BLOCK_M)
    is_row = rows < end
    pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0)
    sources = pairs // TOP_K if IS_GATED else rows.to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < OUT
    ks = tl.arange(0, BLOCK_K)
    x_at = x_ptr + sources[:, None] * x_stride + ks[None, :]
    # 64 bits: a layer's experts are more than 2^31 numbers.
    height: tl.constexpr = 2 * OUT if IS_GATED else OUT
    weight_at = weight_ptr + expert.to(tl.int64) * height * IN + columns[None, :] * IN + ks[:, None]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_up = total
    for k in tl.range(0, IN, BLOCK_K):
        is_k = k + ks < IN
        x = tl.load(x_at + k, mask=is_row[:, None] & is_k[None, :], other=0.0)
        is_weight = is_k[:, None] & is_column[None, :]
        total = product(x, tl.load(weight_at + k, mask=is_weight, other=0.0), total)
        if IS_GATED:
            up = tl.load(weight_at + OUT * IN + k, mask=is_weight, other=0.0)
            total_up = product(x, up, total_up)
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    targets = rows.to(tl.int64) if IS_GATED else pairs
    cells = targets[:, None] * OUT + columns[None, :]
    is_cell = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr + cells, total.to(out_ptr.dtype.element_ty), mask=is_cell)


@triton.jit
def _find_rows(
    starts_ptr,
    index,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The expert of block ``index``, or NUM_EXPERTS if there is no such block; its first row, the expert's end."""
    ids = tl.arange(0, PADDED_EXPERTS)
    is_expert = ids < NUM_EXPERTS
    starts = tl.load(starts_ptr + ids, mask=is_expert, other=0)
    ends = tl.load(starts_ptr + ids + 1, mask=is_expert, other=0)
    blocks = (ends - starts + BLOCK_M - 1) // BLOCK_M
    is_before = (tl.cumsum(blocks, 0) <= index) & is_expert
    expert = tl.sum(is_before.to(tl.int32), 0)
    block = index - tl.sum(tl.where(is_before, blocks, 0), 0)
    is_this = ids == expert
    first = tl.sum(tl.where(is_this, starts, 0), 0) + block * BLOCK_M
    return expert, first, tl.sum(tl.where(is_this, ends, 0), 0)


@triton.jit
def combine_kernel(
    x_ptr,  # [num_tokens, TOP_K, SIZE] float32
    weights_ptr,  # [num_tokens, TOP_K] float32
    out_ptr,  # [num_tokens, SIZE]
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's results, weighed and added up in the order in which they were chosen."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        x = tl.load(x_ptr + row * SIZE + columns, mask=is_inside, other=0.0)
        total += tl.load(weights_ptr + row) * x
    tl.store(out_ptr + token * SIZE + columns, total.to(out_ptr.dtype.element_ty), mask=is_inside)


def pack_experts(
    gate_up: Iterable[Tensor | QuantizedRows], down: Iterable[Tensor | QuantizedRows]
) -> TritonExperts:
    return TritonExperts(*(torch.stack([dense(one) for one in half]) for half in (gate_up, down)))


class TritonMixture:
    """:meth:`~.ops.Ops.routed_experts` on one GPU."""

    def __init__(
        self, gpu: Gpu, tiles: Mapping[str, Tile] | None = None, *, warms_up: bool = False
    ) -> None:
        """With ``warms_up``, what any batch may need of a layer is compiled when the first comes, which is when
        the engine starts. ``tiles``: by crowd, instead of the table's."""
        self._arch = gpu.arch
        self._tiles = tiles or {}
        self._warms_up = warms_up
        self._known: set[object] = set()

    def __call__(
        self, x: Tensor, logits: Tensor, experts: TritonExperts, top_k: int, renormalise: bool
    ) -> Tensor:
        """See :meth:`~.ops.Ops.routed_experts`.

        Raises:
            ValueError: the kernels do not take such types or shapes.
        """
        check_mixture(x, logits, experts, top_k)
        if not len(x):
            return torch.empty_like(x)
        ids, weights = route(logits, top_k, renormalise)
        rows = SortedRows(*sort_pairs(ids, logits.shape[1]), top_k)
        crowd = crowd_of(len(rows.pairs), logits.shape[1])
        kind = (experts.gate_up.shape, x.dtype, x.stride(0), top_k)
        if self._warms_up and kind not in self._known:
            self._known.add(kind)
            compute(x, experts, rows, self._tile({FEW: MANY, MANY: FEW}[crowd], x.dtype))
        return combine(compute(x, experts, rows, self._tile(crowd, x.dtype)), weights, x.dtype)

    def _tile(self, crowd: str, dtype: torch.dtype) -> Tile:
        return self._tiles.get(crowd) or tile_for(self._arch, crowd, dtype)


class SortedRows(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert, those of one by token."""

    starts: Tensor  # [num_experts + 1] int32: first row of each expert, and the end
    pairs: Tensor  # [num_rows] int64: token * top_k + k
    top_k: int


def compute(x: Tensor, experts: TritonExperts, rows: SortedRows, tile: Tile) -> Tensor:
    """Each pair's result, ``[num_rows, hidden]`` float32, in the order of pairs."""
    num_rows = len(rows.pairs)
    hidden = x.new_empty(num_rows, experts.down.shape[2])
    multiply(x, experts.gate_up, hidden, rows, tile, is_gated=True)
    results = x.new_empty(num_rows, x.shape[1], dtype=torch.float32)
    multiply(hidden, experts.down, results, rows, tile, is_gated=False)
    return results


def check_mixture(x: Tensor, logits: Tensor, experts: TritonExperts, top_k: int) -> None:
    """Whether everything fits together.

    Raises:
        ValueError: it does not.
    """
    if x.dtype not in TYPES or experts.gate_up.dtype != x.dtype or experts.down.dtype != x.dtype:
        raise ValueError(
            f"The Triton kernels do not multiply {x.dtype} by experts of {experts.gate_up.dtype}."
        )
    num_experts, height, hidden = experts.gate_up.shape
    if (
        x.shape[1] != hidden
        or logits.shape != (len(x), num_experts)
        or experts.down.shape != (num_experts, hidden, height // 2)
        or not 1 <= top_k <= num_experts
    ):
        raise ValueError(
            f"Rows {tuple(x.shape)}, router logits {tuple(logits.shape)} and {top_k} of the experts "
            f"{tuple(experts.gate_up.shape)}, {tuple(experts.down.shape)} do not fit together."
        )


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """As :func:`~.torch_experts.route`, its twin; ids are int32."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    route_kernel[(num_tokens,)](
        logits,
        ids,
        weights,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        PADDED_EXPERTS=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k),
        RENORMALISE=renormalise,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return ids, weights


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, those of one by token.

    Args:
        ids: ``[num_tokens, top_k]`` int32.

    Returns:
        Each expert's first row, and the end, ``[num_experts + 1]`` int32; the pair, ``token * top_k + k``, of each
        row, ``[num_tokens * top_k]`` int64.
    """
    experts, pairs = torch.sort(ids.flatten(), stable=True)
    bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    return torch.searchsorted(experts, bounds, out_int32=True), pairs


def max_blocks(num_rows: int, num_experts: int, block_m: int) -> int:
    """Blocks of up to ``block_m`` rows of one expert, wherever the rows go."""
    num_chosen = min(num_rows, num_experts)
    return num_chosen + (num_rows - num_chosen) // block_m


def multiply(
    x: Tensor, weights: Tensor, out: Tensor, rows: SortedRows, tile: Tile, *, is_gated: bool
) -> None:
    """Each row by its expert's weight.

    Args:
        x: tokens ``[num_tokens, in]`` where ``is_gated``, else ``[num_rows, in]`` by expert.
        weights: ``[num_experts, height, in]``.
        out: ``[num_rows, out]``: by expert where ``is_gated``, else in the order of pairs.
    """
    num_experts = weights.shape[0]
    blocks = max_blocks(len(rows.pairs), num_experts, tile.block_m)
    experts_kernel[(blocks, triton.cdiv(out.shape[1], tile.block_n))](
        x,
        weights,
        out,
        rows.starts,
        rows.pairs,
        x.stride(0),
        NUM_EXPERTS=num_experts,
        PADDED_EXPERTS=triton.next_power_of_2(num_experts),
        TOP_K=rows.top_k,
        IN=weights.shape[2],
        OUT=out.shape[1],
        IS_GATED=is_gated,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )


def combine(x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's ``x [num_tokens * top_k, size]``, weighed by ``weights [num_tokens, top_k]`` and added up."""
    num_tokens, top_k = weights.shape
    size = x.shape[1]
    out = torch.empty((num_tokens, size), dtype=dtype, device=x.device)
    block = min(COMBINE_BLOCK, triton.next_power_of_2(size))
    grid = (num_tokens, triton.cdiv(size, block))
    constants = {"TOP_K": top_k, "SIZE": size, "BLOCK": block}
    combine_kernel[grid](x, weights, out, num_warps=4, enable_fp_fusion=True, **constants)
    return out
