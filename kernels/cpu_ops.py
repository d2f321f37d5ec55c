"""The native op set for CPUs: thin calls into the C++ of ``cpu_*.cpp``.

Activations are float32 whatever the weights are; keys and values have the model's type. A row's results are
bit-equal in any company. Must not decide anything about numbers: what an op computes is said in ``ops.py``
and in the sources.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .cpu_experts import PackedExperts, stack_packed
from .cpu_linear import (
    PackedWeight,
    RowKind,
    WeightKind,
    pack_gguf_weight,
    pack_weight,
    padded_size,
)
from .cpu_recording import Capacity, Cells, Recording, needed_capacity
from .cpu_structs import (
    AddArgs,
    Args,
    AttentionArgs,
    ClampArgs,
    CombineArgs,
    EmbedArgs,
    GateArgs,
    GeluArgs,
    Instruction,
    LayerNormArgs,
    LinearArgs,
    PackRowsArgs,
    RmsNormArgs,
    RotaryArgs,
    RouteArgs,
    SampleArgs,
    SortExpertsArgs,
    StoreKVArgs,
    program,
    run_program,
)
from .kv_store import move_blocks, untouched_zeros
from .ops import (
    AttentionMetadata,
    Forward,
    KVCacheSpec,
    KVScales,
    LayerKVCache,
    QuantizedRows,
    SamplingSummary,
    SamplingTensors,
    refuse_extras,
)

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
SILU, GELU = 0, 1


class CpuOps:
    """Implements :class:`~.ops.Ops`; see there for every contract.

    Args:
        library: from :func:`~.cpu_build.load_library`.
        rounds_activations: products with GGUF's blocks always take activations of 8 bits, in groups of 32.
    """

    name = "cpu"
    quantized_types = frozenset({"Q4_0", "Q4_1", "Q8_0"})

    def __init__(self, library: ctypes.CDLL, *, rounds_activations: bool = False) -> None:
        self._library = library
        self._row_kind = RowKind.INT8 if rounds_activations else None
        self._cells = Cells()
        self._recording: Recording | None = None

    # --- weights -------------------------------------------------------------------------------

    def pack_linear(
        self, weight: Tensor | QuantizedRows, bias: Tensor | None = None
    ) -> PackedWeight:
        if isinstance(weight, QuantizedRows):
            kind = WeightKind[weight.type]
            return pack_gguf_weight(self._library, weight.blocks, kind, bias, self._row_kind)
        return pack_weight(self._library, weight, bias)

    def pack_head(self, weight: Tensor | QuantizedRows) -> PackedWeight:
        return self.pack_linear(weight)

    def pack_vector(self, vector: Tensor) -> Tensor:
        return vector.float().contiguous()

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        _require(table.is_contiguous(), f"a table with strides {table.stride()}")
        out = self._empty((len(token_ids), table.shape[1]))
        self._do(
            EmbedArgs(
                num_tokens=self._tokens(token_ids),
                token_ids=token_ids.data_ptr(),
                table=table.data_ptr(),
                dtype=FLOAT_TYPES[table.dtype],
                hidden=table.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        size = packed.in_features
        _require(x.shape[1] == size, f"rows of {x.shape[1]} times a weight of {size} in_features")
        return self._multiply(x, packed, self._tokens(x))

    def _multiply(
        self,
        x: Tensor,
        packed: PackedWeight,
        num_rows: int,
        *,
        sources: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """A product of as many rows as the number at the address ``num_rows`` says.

        Args:
            sources: ``[max_num_rows]`` int32, which of x's rows each row is; ``None``: the same one.
            starts: ``[num_groups + 1]`` int32, the first row of each of ``packed``'s weights; ``None``: it is one.
        """
        capacity = x.shape[0] if sources is None else sources.shape[0]
        out = self._empty((capacity, packed.out_features))
        address, stride, rows = _rows(x), x.stride(0), None
        if packed.row_kind != RowKind.FLOAT32 or sources is not None:
            rows = self._empty((self._packed_rows_size(packed, capacity),), torch.uint8)
            self._do(
                PackRowsArgs(
                    num_tokens=num_rows,
                    x=address,
                    x_stride=stride,
                    sources=None if sources is None else sources.data_ptr(),
                    num_sources=x.shape[0],
                    size=packed.in_features,
                    kind=packed.row_kind,
                    capacity=capacity,
                    out=rows.data_ptr(),
                )
            )
            address, stride = rows.data_ptr(), padded_size(packed.in_features)
        self._do(
            LinearArgs(
                num_tokens=num_rows,
                x=address,
                x_stride=stride,
                capacity=capacity,
                row_kind=packed.row_kind,
                weight=packed.data.data_ptr(),
                kind=packed.kind,
                in_features=packed.in_features,
                out_features=packed.out_features,
                bias=None if packed.bias is None else packed.bias.data_ptr(),
                out=out.data_ptr(),
                out_stride=out.stride(0),
                group_starts=None if starts is None else starts.data_ptr(),
                num_groups=0 if starts is None else len(starts) - 1,
                weight_stride=0 if starts is None else packed.data.stride(0),
            )
        )
        return out

    def _packed_rows_size(self, packed: PackedWeight, capacity: int) -> int:
        size: int = self._library.octavo_packed_rows_size(
            packed.row_kind, capacity, packed.in_features
        )
        return size

    def logits(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return self.linear(x, packed)

    # --- mixtures of experts -------------------------------------------------------------------

    def pack_experts(
        self,
        gate_up: Iterable[Tensor | QuantizedRows],
        down: Iterable[Tensor | QuantizedRows],
        num_experts: int,
    ) -> PackedExperts:
        first, second = (
            stack_packed((self.pack_linear(weight) for weight in weights), num_experts)
            for weights in (gate_up, down)
        )
        packed = PackedExperts(first, second, num_experts)
        _require_fitting(packed)
        return packed

    def routed_experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        packed: PackedExperts,
        *,
        top_k: int,
        renormalise: bool,
    ) -> Tensor:
        _require_experts(x, router_logits, packed, top_k)
        experts, weights = self._route(router_logits, top_k, renormalise)
        num_rows, starts, tokens, rows = self._sort(experts, packed.num_experts)
        cell = num_rows.data_ptr()
        gate_up = self._multiply(x, packed.gate_up, cell, sources=tokens, starts=starts)
        gated = self._gate(gate_up, SILU, cell)
        return self._combine(self._multiply(gated, packed.down, cell, starts=starts), rows, weights)

    def _route(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, ``[num_tokens, top_k]`` int32 and float32."""
        shape = (logits.shape[0], top_k)
        experts, weights = self._empty(shape, torch.int32), self._empty(shape)
        self._do(
            RouteArgs(
                num_tokens=self._tokens(logits),
                logits=_rows(logits),
                logits_stride=logits.stride(0),
                num_experts=logits.shape[1],
                top_k=top_k,
                is_renormalised=int(renormalise),
                experts=experts.data_ptr(),
                weights=weights.data_ptr(),
            )
        )
        return experts, weights

    def _sort(self, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows by expert: their number, each expert's first, each row's token, each token's rows."""
        num_rows = self._empty((1,), torch.int64)
        starts = self._empty((num_experts + 1,), torch.int32)
        tokens = self._empty((experts.numel(),), torch.int32)
        rows = self._empty(experts.shape, torch.int32)
        self._do(
            SortExpertsArgs(
                num_tokens=self._tokens(experts),
                experts=experts.data_ptr(),
                num_experts=num_experts,
                top_k=experts.shape[1],
                num_rows=num_rows.data_ptr(),
                starts=starts.data_ptr(),
                tokens=tokens.data_ptr(),
                rows=rows.data_ptr(),
            )
        )
        return num_rows, starts, tokens, rows

    def _combine(self, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Each token's ``rows [num_tokens, top_k]`` of x, weighed and added up."""
        out = self._empty((rows.shape[0], x.shape[1]))
        self._do(
            CombineArgs(
                num_tokens=self._tokens(rows),
                x=_rows(x),
                x_stride=x.stride(0),
                rows=rows.data_ptr(),
                weights=weights.data_ptr(),
                top_k=rows.shape[1],
                size=x.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    # --- elementwise ---------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        _require(len(weight) == x.shape[1], f"a norm of {len(weight)} for rows of {x.shape[1]}")
        out = self._empty(x.shape)
        self._do(
            RmsNormArgs(
                num_tokens=self._tokens(x),
                x=_rows(x),
                x_stride=x.stride(0),
                residual=None if residual is None else _rows(residual),
                residual_stride=0 if residual is None else residual.stride(0),
                weight=weight.data_ptr(),
                eps=eps,
                size=x.shape[1],
                num_heads=1,
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._layer_norm(x, None, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._layer_norm(x, residual, weight, bias, eps), residual

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        for vector in (weight,) if bias is None else (weight, bias):
            _require(len(vector) == x.shape[1], f"a norm of {len(vector)} for rows of {x.shape[1]}")
        out = self._empty(x.shape)
        self._do(
            LayerNormArgs(
                num_tokens=self._tokens(x),
                x=_rows(x),
                x_stride=x.stride(0),
                residual=None if residual is None else _rows(residual),
                residual_stride=0 if residual is None else residual.stride(0),
                weight=weight.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                eps=eps,
                size=x.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._norm_heads(q, q_weight, eps)
        self._norm_heads(k, k_weight, eps)
        return q, k

    def _norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """In place, so that the keys stay as far apart as the values are."""
        num_heads, dim = heads.shape[1:]
        is_whole = len(weight) == num_heads * dim
        _require(
            (is_whole and heads.stride(1) == dim) or len(weight) == dim,
            f"a norm of {len(weight)} for {num_heads} heads of {dim}",
        )
        self._do(
            RmsNormArgs(
                num_tokens=self._tokens(heads),
                x=_rows(heads),
                x_stride=heads.stride(0),
                weight=weight.data_ptr(),
                eps=eps,
                size=len(weight),
                num_heads=1 if is_whole else num_heads,
                head_stride=heads.stride(1),
                out=heads.data_ptr(),
                out_stride=heads.stride(0),
            )
        )

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._add(x, factor, None, x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._add(x, 1.0, residual, residual)

    def _add(self, x: Tensor, factor: float, residual: Tensor | None, out: Tensor) -> Tensor:
        _require(x.shape == out.shape, f"the sum of {tuple(x.shape)} and {tuple(out.shape)}")
        self._do(
            AddArgs(
                num_tokens=self._tokens(x),
                x=_rows(x),
                x_stride=x.stride(0),
                factor=factor,
                size=x.shape[1],
                residual=None if residual is None else _rows(residual),
                out=_rows(out),
                out_stride=out.stride(0),
            )
        )
        return out

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        num_heads, dim = x.shape[1:]
        _require(num_heads == 1 or x.stride(1) == dim, f"heads {x.stride(1)} apart within a limit")
        self._do(
            ClampArgs(
                num_tokens=self._tokens(x),
                x=_rows(x),
                x_stride=x.stride(0),
                size=num_heads * dim,
                limit=limit,
            )
        )
        return x

    def gelu(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        self._do(
            GeluArgs(
                num_tokens=self._tokens(x),
                x=_rows(x),
                x_stride=x.stride(0),
                size=x.shape[1],
                is_tanh=is_tanh,
                out=_rows(x),
                out_stride=x.stride(0),
            )
        )
        return x

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, SILU, self._tokens(x))

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, GELU, self._tokens(x))

    def _gate(self, x: Tensor, kind: int, num_tokens: int) -> Tensor:
        out = self._empty((x.shape[0], x.shape[1] // 2))
        self._do(
            GateArgs(
                num_tokens=num_tokens,
                x=_rows(x),
                x_stride=x.stride(0),
                size=out.shape[1],
                kind=kind,
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        head_dim, rotary_dim = q.shape[2], cos_sin.shape[1]
        is_possible = rotary_dim <= head_dim == k.shape[2] and rotary_dim % 2 == 0
        _require(is_possible, f"{rotary_dim} of heads of {head_dim} and {k.shape[2]} rotated")
        for heads, num_heads in _joined(q, k):
            self._do(
                RotaryArgs(
                    num_tokens=self._tokens(q),
                    heads=_rows(heads),
                    token_stride=heads.stride(0),
                    head_stride=heads.stride(1),
                    num_heads=num_heads,
                    head_dim=heads.shape[2],
                    rotary_dim=cos_sin.shape[1],
                    positions=positions.data_ptr(),
                    cos_sin=cos_sin.data_ptr(),
                )
            )
        return q, k

    # --- KV cache and attention ----------------------------------------------------------------

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
        refuse_extras(self.name, None, kv_scales)
        _require_cache(cache, k.shape[1:], f"keys of {tuple(k.shape[1:])}")
        if k.stride() != v.stride():
            _require(self._recording is None, "keys and values that lie differently, recorded")
            k, v = k.contiguous(), v.contiguous()
        self._do(
            StoreKVArgs(
                num_tokens=self._tokens(k),
                k=_rows(k),
                v=_rows(v),
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
        refuse_extras(self.name, sinks, kv_scales)
        num_kv_heads = cache.key.shape[1]
        _require(q.shape[1] % num_kv_heads == 0, f"{q.shape[1]} heads over {num_kv_heads}")
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
                q=_rows(q),
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

    # --- logits --------------------------------------------------------------------------------

    def sample(
        self, logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None = None
    ) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        self._cells.set(0, len(logits))
        self._do(
            SampleArgs(
                num_rows=self._cells.num_rows,
                logits=_rows(logits),
                logits_stride=logits.stride(0),
                vocab_size=logits.shape[1],
                temperature=params.temperature.data_ptr(),
                top_k=params.top_k.data_ptr(),
                top_p=params.top_p.data_ptr(),
                min_p=params.min_p.data_ptr(),
                seed=params.seed.data_ptr(),
                position=params.position.data_ptr(),
                out=out.data_ptr(),
            )
        )
        return out

    # --- running and recording -----------------------------------------------------------------

    def record_step(self, forward: Forward) -> Forward:
        """``forward``, with all of a step's ops in one native call.

        It is called when a step has more tokens, rows or blocks than any before, to record its ops anew;
        they must depend on nothing but the arguments' sizes.
        """
        return _RecordedStep(self, forward)

    def record(self, forward: Forward, capacity: Capacity, num_groups: int) -> Recording:
        """Call ``forward`` with room for ``capacity``; its ops are noted and not run."""
        recording = Recording(capacity, num_groups)
        self._recording = recording
        try:
            hidden = forward(recording.token_ids, recording.positions, recording.metadata)
        finally:
            self._recording = None
        recording.finish(hidden)
        return recording

    def run(self, instructions: ctypes.Array[Instruction]) -> None:
        """Run a program on as many threads as torch uses."""
        run_program(self._library, instructions, torch.get_num_threads())

    def _do(self, args: Args) -> None:
        if self._recording is not None:
            self._recording.add(args)
        else:
            self.run(program([args]))

    def _empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        if self._recording is not None:
            return self._recording.arena.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype)

    def _tokens(self, x: Tensor) -> int:
        """Address of the number of tokens, those of ``x``."""
        if self._recording is not None:
            return self._recording.cells.num_tokens
        self._cells.set(x.shape[0])
        return self._cells.num_tokens

    def _rows_of(self, metadata: AttentionMetadata) -> Cells:
        if self._recording is not None:
            return self._recording.cells
        tables = metadata.block_tables
        self._cells.set(0, len(metadata.seq_lens), tables.stride(0))
        return self._cells


class _RecordedStep:
    """Records when a step needs more room than there is, replays otherwise."""

    def __init__(self, ops: CpuOps, forward: Forward) -> None:
        self._ops = ops
        self._forward = forward
        self._recording: Recording | None = None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
    ) -> Tensor:
        needed = needed_capacity(token_ids, metadata)
        recording = self._recording
        if recording is None or not recording.capacity.holds(needed):
            known = Capacity(0, 0, 0) if recording is None else recording.capacity
            grown = known.grown(needed)
            recording = self._recording = self._ops.record(self._forward, grown, len(metadata))
        return recording.replay(token_ids, positions, metadata, self._ops.run)


def _require(is_met: bool, wrong: str) -> None:
    """What torch would refuse, C++ would read past the end of."""
    if not is_met:
        raise ValueError(f"native ops do not compute {wrong}")


def _require_fitting(packed: PackedExperts) -> None:
    hidden, mlp = packed.gate_up.in_features, packed.down.in_features
    is_fitting = packed.gate_up.out_features == 2 * mlp and packed.down.out_features == hidden
    shapes = [(half.out_features, half.in_features) for half in packed[:2]]
    _require(is_fitting, f"experts of {shapes[0]} before {shapes[1]}")


def _require_experts(x: Tensor, logits: Tensor, packed: PackedExperts, top_k: int) -> None:
    size, num_experts = packed.gate_up.in_features, packed.num_experts
    _require(x.shape[1] == size, f"rows of {x.shape[1]} times experts of {size} in_features")
    _require(logits.shape == (x.shape[0], num_experts), f"{tuple(logits.shape)} router logits")
    _require(1 <= top_k <= num_experts, f"{top_k} of {num_experts} experts")


def _require_cache(cache: LayerKVCache, heads: Sequence[int], what: str) -> None:
    """``heads``: heads and numbers of each, of what is stored or looked for."""
    stored = (cache.value.shape[1], cache.value.shape[3])
    _require(stored == tuple(heads), f"{what} with a cache of {stored}")


def _rows(x: Tensor) -> int:
    """Address of a tensor whose innermost dimension is contiguous."""
    if x.stride(-1) != 1 or x.dtype != torch.float32:
        raise ValueError(f"native ops need float32 rows, not {x.dtype} with strides {x.stride()}")
    return x.data_ptr()


def _joined(q: Tensor, k: Tensor) -> list[tuple[Tensor, int]]:
    """Heads to rotate, as one tensor where k follows q in memory."""
    num_q_heads, num_k_heads = q.shape[1], k.shape[1]
    is_adjacent = (
        q.stride() == k.stride()
        and k.data_ptr() == q.data_ptr() + num_q_heads * q.stride(1) * q.element_size()
    )
    return [(q, num_q_heads + num_k_heads)] if is_adjacent else [(q, num_q_heads), (k, num_k_heads)]
