"""The native ops' arguments as Python writes them: a mirror of ``cpu_ops.h`` and ``cpu_program.h``.

A struct holds addresses and keeps nothing alive: whoever fills one keeps its tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from enum import IntEnum
from typing import Any, ClassVar


class OpKind(IntEnum):
    """``octavo::OpKind``."""

    EMBED = 0
    RMS_NORM = 1
    GATE = 2
    ROTARY = 3
    STORE_KV = 4
    ATTENTION = 5
    PACK_ROWS = 6
    LINEAR = 7
    SAMPLE = 8
    ADD = 9
    LIKELIEST = 10
    LAYER_NORM = 20
    GELU = 21
    ROUTE = 30
    SORT_EXPERTS = 31
    COMBINE = 32
    CLAMP = 33


DONE = 0
"""``octavo::RunResult``, if nothing was wanting."""

TOKENWISE = frozenset(
    (
        OpKind.EMBED,
        OpKind.RMS_NORM,
        OpKind.ADD,
        OpKind.LAYER_NORM,
        OpKind.GELU,
        OpKind.GATE,
        OpKind.ROTARY,
        OpKind.STORE_KV,
        OpKind.PACK_ROWS,
        OpKind.ROUTE,
        OpKind.COMBINE,
        OpKind.CLAMP,
    )
)
"""Ops that do each token by itself: neighbours run without a barrier between them."""


class Args(ctypes.Structure):
    """What one op is called with. A field that is not given is zero or null."""

    op: ClassVar[OpKind]


class EmbedArgs(Args):
    op = OpKind.EMBED
    _fields_ = (
        ("num_tokens", c_void_p),
        ("token_ids", c_void_p),
        ("table", c_void_p),
        ("dtype", c_int64),
        ("hidden", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class RmsNormArgs(Args):
    op = OpKind.RMS_NORM
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("eps", c_float),
        ("size", c_int64),
        ("num_heads", c_int64),
        ("head_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class AddArgs(Args):
    op = OpKind.ADD
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("factor", c_float),
        ("size", c_int64),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class LayerNormArgs(Args):
    op = OpKind.LAYER_NORM
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("size", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class GeluArgs(Args):
    op = OpKind.GELU
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("is_tanh", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class GateArgs(Args):
    op = OpKind.GATE
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("kind", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class RotaryArgs(Args):
    op = OpKind.ROTARY
    _fields_ = (
        ("num_tokens", c_void_p),
        ("heads", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
    )


class StoreKVArgs(Args):
    op = OpKind.STORE_KV
    _fields_ = (
        ("num_tokens", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("slots", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("dtype", c_int64),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class AttentionArgs(Args):
    op = OpKind.ATTENTION
    _fields_ = (
        ("num_rows", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_void_p),
        ("q", c_void_p),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("key", c_void_p),
        ("value", c_void_p),
        ("dtype", c_int64),
        ("block_size", c_int64),
        ("num_q_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
        ("window", c_int64),
        ("soft_cap", c_float),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class PackRowsArgs(Args):
    op = OpKind.PACK_ROWS
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("sources", c_void_p),
        ("num_sources", c_int64),
        ("size", c_int64),
        ("kind", c_int64),
        ("capacity", c_int64),
        ("out", c_void_p),
    )


class LinearArgs(Args):
    op = OpKind.LINEAR
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("capacity", c_int64),
        ("row_kind", c_int64),
        ("weight", c_void_p),
        ("kind", c_int64),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("group_starts", c_void_p),
        ("num_groups", c_int64),
        ("weight_stride", c_int64),
        ("likeliest", c_void_p),
    )


class RouteArgs(Args):
    op = OpKind.ROUTE
    _fields_ = (
        ("num_tokens", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("is_renormalised", c_int64),
        ("experts", c_void_p),
        ("weights", c_void_p),
    )


class SortExpertsArgs(Args):
    op = OpKind.SORT_EXPERTS
    _fields_ = (
        ("num_tokens", c_void_p),
        ("experts", c_void_p),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("num_rows", c_void_p),
        ("starts", c_void_p),
        ("tokens", c_void_p),
        ("rows", c_void_p),
    )


class CombineArgs(Args):
    op = OpKind.COMBINE
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_void_p),
        ("weights", c_void_p),
        ("top_k", c_int64),
        ("size", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class SampleArgs(Args):
    op = OpKind.SAMPLE
    _fields_ = (
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("vocab_size", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("position", c_void_p),
        ("out", c_void_p),
    )


class LikeliestArgs(Args):
    op = OpKind.LIKELIEST
    _fields_ = (
        ("num_rows", c_void_p),
        ("likeliest", c_void_p),
        ("capacity", c_int64),
        ("out", c_void_p),
    )


class ClampArgs(Args):
    op = OpKind.CLAMP
    _fields_ = (
        ("num_tokens", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int64),
        ("limit", c_float),
    )


class Instruction(ctypes.Structure):
    """One op of a program."""

    _fields_ = (("kind", c_int64), ("args", c_void_p))


class LayoutEntry(ctypes.Structure):
    """A line of the library's own table of structs, fields and kinds."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", c_int64), ("size", c_int64))


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # what each returns, then what it takes
    "octavo_run": (c_int64, c_void_p, c_int64, c_int64),
    "octavo_layout": (c_int64, ctypes.POINTER(ctypes.POINTER(LayoutEntry))),
    "octavo_packed_rows_size": (c_int64, c_int64, c_int64, c_int64),
    "octavo_likeliest_size": (c_int64, c_int64, c_int64),
    "octavo_row_kind": (c_int64, c_int64),
    "octavo_packed_size": (c_int64, c_int64, c_int64, c_int64),
    "octavo_pack_weight": (
        None,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
    ),
}


def program(steps: Sequence[Args]) -> ctypes.Array[Instruction]:
    """Ops in the order in which they run. Holds the addresses of ``steps``: keep them."""
    rows = [Instruction(int(step.op), ctypes.addressof(step)) for step in steps]
    return (Instruction * len(rows))(*rows)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the library's functions take, so that no address loses its upper half.

    A function that the library lacks is passed over.
    """
    for name, (result, *arguments) in _FUNCTIONS.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def run(library: ctypes.CDLL, steps: Sequence[Args], num_threads: int) -> None:
    """Run ops once, one after the other."""
    run_program(library, program(steps), num_threads)


def run_program(
    library: ctypes.CDLL, instructions: ctypes.Array[Instruction], num_threads: int
) -> None:
    """Run a program.

    Raises:
        MemoryError: an op found no memory for what it needs itself. What was written does not count.
    """
    if library.octavo_run(ctypes.addressof(instructions), len(instructions), num_threads) != DONE:
        raise MemoryError("The native ops found no memory for their own use.")
