"""The native ops in another process, built for another processor or with a sanitizer; see native_driver.cpp.

:class:`DrivenLibrary` answers as the shared library does. Each call sends the memory that its ops may touch, as
far as ``cpu_ops.h`` says they may and no further, and writes back what they left there.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels import cpu_build
from octavo.kernels.cpu_structs import (
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
    OpKind,
    PackRowsArgs,
    RmsNormArgs,
    RotaryArgs,
    RouteArgs,
    SampleArgs,
    SortExpertsArgs,
    StoreKVArgs,
)

Span = tuple[str, int]
"""A pointer in Args, and the bytes behind it that the op may touch."""

_RUN, _ROWS_SIZE, _WEIGHT_SIZE, _PACK_WEIGHT, _ROW_KIND = 1, 2, 3, 4, 5
_BFLOAT16 = 1
_ARGS = {kind.op: kind for kind in Args.__subclasses__()}


def build_driver(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """Compile the ops and the driver into a program."""

    def compile_one(source: Path) -> str:
        product = folder / f"{source.stem}.o"
        include = f"-I{cpu_build.SOURCES}"
        common = [flag for flag in cpu_build.FLAGS if flag not in ("-O3", "-fPIC")]
        command = [compiler, *common, *flags, include, "-c", str(source), "-o", str(product)]
        subprocess.run(command, check=True)
        return str(product)

    sources = [*cpu_build.SOURCES.glob("cpu_*.cpp"), Path(__file__).with_suffix(".cpp")]
    with ThreadPoolExecutor(2) as pool:
        products = list(pool.map(compile_one, sources))
    driver = folder / "driver"
    subprocess.run([compiler, *flags, *products, "-pthread", "-o", str(driver)], check=True)
    return driver


class DrivenLibrary:
    """The functions of the library, answered by a driver."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        self.octavo_run = _Function(self._run)
        self.octavo_packed_rows_size = _Function(lambda *a: self._ask(_ROWS_SIZE, *a))
        self.octavo_packed_size = _Function(lambda *a: self._ask(_WEIGHT_SIZE, *a))
        self.octavo_row_kind = _Function(lambda kind: self._ask(_ROW_KIND, kind))
        self.octavo_pack_weight = _Function(self._pack_weight)

    def close(self) -> None:
        """End the driver, which must not have complained."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def _run(self, address: int, count: int, num_threads: int) -> int:
        program = (Instruction * count).from_address(address)
        steps = [_ARGS[OpKind(row.kind)].from_address(row.args) for row in program]
        regions = _merged(
            (getattr(args, name), size) for args in steps for name, size in self._spans(args)
        )
        self._send(_RUN, num_threads, len(regions), *(n for region in regions for n in region))
        self._send(len(steps))
        for args in steps:
            pointers = _pointers(type(args))
            self._send(int(args.op), ctypes.sizeof(args), len(pointers), *pointers)
            self._write(bytes(args))
        for start, size in regions:
            self._write(ctypes.string_at(start, size))
        (result,) = self._numbers(1)
        for start, size in regions:
            ctypes.memmove(start, self._read(size), size)
        return result

    def _pack_weight(
        self,
        kind: int,
        row_kind: int,
        source: int,
        stride: int,
        out_features: int,
        in_features: int,
        packed: int,
        num_threads: int,
    ) -> None:
        row = {0: 4 * in_features, 1: 2 * in_features, 2: 18, 3: 20, 4: 34}[kind]
        row *= 1 if kind < 2 else in_features // 32
        source_size = (out_features - 1) * stride + row
        size = self._ask(_WEIGHT_SIZE, kind, out_features, in_features)
        self._send(_PACK_WEIGHT, kind, row_kind, stride, out_features, in_features, num_threads)
        self._send(source_size, size)
        self._write(ctypes.string_at(source, source_size))
        ctypes.memmove(packed, self._read(size), size)

    def _ask(self, request: int, *numbers: int) -> int:
        self._send(request, *numbers)
        (answer,) = self._numbers(1)
        return answer

    def _send(self, *numbers: int) -> None:
        self._write(struct.pack(f"<{len(numbers)}q", *numbers))

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)

    def _numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self._read(8 * count))

    def _read(self, size: int) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.flush()
        content = self._process.stdout.read(size)
        assert len(content) == size, f"the driver ended with {self._process.wait(60)}"
        return content

    # --- what an op may touch --------------------------------------------------------------------

    def _spans(self, args: Args) -> Iterator[Span]:
        spans = [span for span in _SPANS[type(args)](self, args) if getattr(args, span[0])]
        yield from ((name, size) for name, size in spans if size > 0)

    def _embed(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        ids = _array(a.token_ids, n, np.int64)
        itemsize = 2 if a.dtype == _BFLOAT16 else 4
        yield from (("num_tokens", 8), ("token_ids", n * 8))
        yield "table", (int(ids.max(initial=-1)) + 1) * a.hidden * itemsize
        yield "out", _rows(n, a.out_stride, a.hidden)

    def _rms_norm(self, a: Any) -> Iterator[Span]:
        n, token = _number(a.num_tokens), (a.num_heads - 1) * a.head_stride + a.size
        yield from (("num_tokens", 8), ("weight", a.size * 4))
        yield "x", _rows(n, a.x_stride, token)
        yield "residual", _rows(n, a.residual_stride, a.size)
        yield "out", _rows(n, a.out_stride, token)

    def _add(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield "num_tokens", 8
        yield "x", _rows(n, a.x_stride, a.size)
        yield "residual", _rows(n, a.out_stride, a.size)
        yield "out", _rows(n, a.out_stride, a.size)

    def _layer_norm(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield from (("num_tokens", 8), ("weight", a.size * 4), ("bias", a.size * 4))
        yield "x", _rows(n, a.x_stride, a.size)
        yield "residual", _rows(n, a.residual_stride, a.size)
        yield "out", _rows(n, a.out_stride, a.size)

    def _gelu(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield "num_tokens", 8
        yield "x", _rows(n, a.x_stride, a.size)
        yield "out", _rows(n, a.out_stride, a.size)

    def _gate(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield "num_tokens", 8
        yield "x", _rows(n, a.x_stride, 2 * a.size)
        yield "out", _rows(n, a.out_stride, a.size)

    def _rotary(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        positions = _array(a.positions, n, np.int64)
        token = (a.num_heads - 1) * a.head_stride + a.head_dim
        yield from (("num_tokens", 8), ("positions", n * 8))
        yield "heads", _rows(n, a.token_stride, token)
        yield "cos_sin", (int(positions.max(initial=-1)) + 1) * a.rotary_dim * 4

    def _store_kv(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        slots = _array(a.slots, n, np.int64)
        token = (a.num_kv_heads - 1) * a.head_stride + a.head_dim
        yield from (("num_tokens", 8), ("slots", n * 8))
        yield "k", _rows(n, a.token_stride, token)
        yield "v", _rows(n, a.token_stride, token)
        yield from _cache(a, int(slots.max(initial=-1)) // a.block_size)

    def _attention(self, a: Any) -> Iterator[Span]:
        num_rows, stride = _number(a.num_rows), _number(a.table_stride)
        starts = _array(a.query_start_loc, num_rows + 1, np.int32)
        tables = _array(a.block_tables, num_rows * stride, np.int32)
        n, group = int(starts[-1]), a.num_q_heads
        yield from (("num_rows", 8), ("table_stride", 8))
        yield from (("query_start_loc", num_rows * 4 + 4), ("seq_lens", num_rows * 4))
        yield "block_tables", num_rows * stride * 4
        yield "q", _rows(n, a.q_token_stride, (group - 1) * a.q_head_stride + a.head_dim)
        yield "out", _rows(n, a.out_stride, group * a.head_dim)
        yield from _cache(a, int(tables.max(initial=-1)))

    def _pack_rows(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield from (("num_tokens", 8), ("sources", n * 4))
        yield "x", _rows(a.num_sources if a.sources else n, a.x_stride, a.size)
        yield "out", self._ask(_ROWS_SIZE, a.kind, a.capacity, a.size)

    def _linear(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield "num_tokens", 8
        if a.kind == 0:
            yield "x", _rows(n, a.x_stride, a.in_features)
        else:
            yield "x", self._ask(_ROWS_SIZE, a.row_kind, a.capacity, a.in_features)
        weight = self._ask(_WEIGHT_SIZE, a.kind, a.out_features, a.in_features)
        yield "weight", (max(a.num_groups, 1) - 1) * a.weight_stride + weight
        yield from (("bias", a.out_features * 4), ("group_starts", a.num_groups * 4 + 4))
        yield "out", _rows(n, a.out_stride, a.out_features)

    def _sample(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_rows)
        yield from (("num_rows", 8), ("logits", _rows(n, a.logits_stride, a.vocab_size)))
        yield from ((name, n * 4) for name in ("temperature", "top_p", "min_p"))
        yield from ((name, n * 8) for name in ("top_k", "seed", "position", "out"))

    def _route(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield from (("num_tokens", 8), ("logits", _rows(n, a.logits_stride, a.num_experts)))
        yield from ((name, n * a.top_k * 4) for name in ("experts", "weights"))

    def _sort_experts(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield from (("num_tokens", 8), ("num_rows", 8), ("starts", a.num_experts * 4 + 4))
        yield from ((name, n * a.top_k * 4) for name in ("experts", "tokens", "rows"))

    def _clamp(self, a: Any) -> Iterator[Span]:
        yield from (("num_tokens", 8), ("x", _rows(_number(a.num_tokens), a.x_stride, a.size)))

    def _combine(self, a: Any) -> Iterator[Span]:
        n = _number(a.num_tokens)
        yield from (("num_tokens", 8), ("x", _rows(n * a.top_k, a.x_stride, a.size)))
        yield from ((name, n * a.top_k * 4) for name in ("rows", "weights"))
        yield "out", _rows(n, a.out_stride, a.size)


_SPANS: dict[type[Args], Callable[[DrivenLibrary, Any], Iterator[Span]]] = {
    EmbedArgs: DrivenLibrary._embed,
    RmsNormArgs: DrivenLibrary._rms_norm,
    LayerNormArgs: DrivenLibrary._layer_norm,
    AddArgs: DrivenLibrary._add,
    GeluArgs: DrivenLibrary._gelu,
    GateArgs: DrivenLibrary._gate,
    RotaryArgs: DrivenLibrary._rotary,
    StoreKVArgs: DrivenLibrary._store_kv,
    AttentionArgs: DrivenLibrary._attention,
    PackRowsArgs: DrivenLibrary._pack_rows,
    LinearArgs: DrivenLibrary._linear,
    SampleArgs: DrivenLibrary._sample,
    RouteArgs: DrivenLibrary._route,
    SortExpertsArgs: DrivenLibrary._sort_experts,
    CombineArgs: DrivenLibrary._combine,
    ClampArgs: DrivenLibrary._clamp,
}


class _Function:
    """As ctypes has them: its types can be declared, and arguments may be wrapped."""

    restype: Any = None
    argtypes: Any = None

    def __init__(self, call: Callable[..., int | None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int | None:
        return self._call(*(int(getattr(value, "value", value)) for value in arguments))


def _pointers(kind: type[Args]) -> list[int]:
    """Offsets of the fields that hold addresses."""
    fields = [(name, field) for name, field, *_ in kind._fields_]
    return [getattr(kind, name).offset for name, field in fields if field is ctypes.c_void_p]


def _merged(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Addresses and sizes, those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(spans):
        if merged and start < sum(merged[-1]):
            first, length = merged[-1]
            merged[-1] = (first, max(length, start + size - first))
        else:
            merged.append((start, size))
    assert all(sum(one) <= other[0] for one, other in pairwise(merged))
    return merged


def _number(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _array(address: int, count: int, dtype: type[np.generic]) -> NDArray[Any]:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype)


def _rows(count: int, stride: int, size: int) -> int:
    """Bytes of `count` rows of float32."""
    return ((count - 1) * stride + size) * 4 if count > 0 else 0


def _cache(a: Any, last_block: int) -> Iterator[Span]:
    """Keys and values up to a block; see cpu_kv.h."""
    per_word = 2 if a.dtype == _BFLOAT16 else 1
    blocks = (last_block + 1) * a.num_kv_heads * 4
    yield "key", blocks * -(-a.head_dim // per_word) * a.block_size
    yield "value", blocks * -(-a.block_size // per_word) * a.head_dim
