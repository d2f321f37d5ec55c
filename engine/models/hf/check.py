"""Whether a transformers model is one that can be batched over paged keys and values.

A class may ignore what its attention function is for: read masks, look at neighbouring tokens, keep a state.
So each model is asked, when it is loaded, what its layers want; and two short sequences must have, in pieces
and beside each other, the logits that the class gives each of them alone with its own attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....kernels.ops import AttentionMetadata, Ops
from ...checkpoint.spec import LayerSpec, ModelSpec
from .attention import AttentionCall, PagedAttention
from .model import TransformersModel, run

BLOCK_SIZE = 16
NUM_TOKENS = BLOCK_SIZE + 2  # of each sequence
BLOCKS = ((3, 1), (0, 2))  # of each sequence

LIMITS = {torch.float32: 0.01}
"""How far logits may be from the model's own, by the type of weights: ``|a - b| / |b - mean(b)|`` over all. A layer
that attends to anything else is off by far more than rounding is."""
NARROW_LIMIT = 0.2


class Piece(NamedTuple):
    """Tokens ``start .. end - 1`` of a sequence, in one step."""

    sequence: int
    start: int
    end: int


def own_logits(causal: Any, spec: ModelSpec) -> list[Tensor]:
    """The sequences' logits by the class itself, ``[num_tokens, vocab_size]`` float32 each."""
    sequences = _sequences(spec)
    ids = [torch.tensor([tokens], device=causal.device) for tokens in sequences]
    return [causal(input_ids=row, use_cache=False).logits[0].float() for row in ids]


def spec_of(
    config: Any, base: nn.Module, attention: PagedAttention, spec: ModelSpec, device: torch.device
) -> ModelSpec:
    """``spec`` with what the layers' attention calls say.

    Raises:
        NotImplementedError: they are not those of a decoder whose layers all have keys and values of one shape.
    """
    ids = torch.tensor(_sequences(spec)[0], device=device)
    hidden = run(base, ids, torch.arange(len(ids), device=device))
    calls = sorted(attention.calls, key=lambda call: call.layer)
    attention.calls.clear()
    _refuse_calls(calls, spec)
    for call, window in zip(calls, _windows(config, len(calls)), strict=True):
        if call.window != window:
            raise NotImplementedError(
                f"layer {call.layer} asks for a window of {call.window} and its configuration for {window}"
            )
    return replace(
        spec,
        hidden_size=hidden.shape[1],
        num_q_heads=calls[0].num_q_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        layers=tuple(LayerSpec(rope=None, window=call.window) for call in calls),
    )


def _windows(config: Any, num_layers: int) -> Sequence[int | None]:
    """Of each layer, as masks are made: which no attention function sees."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds[:num_layers]]
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return [None] * num_layers
    return [window] * num_layers


def _refuse_calls(calls: Sequence[AttentionCall], spec: ModelSpec) -> None:
    if [call.layer for call in calls] != list(range(spec.num_layers)):
        raise NotImplementedError(f"not each of its {spec.num_layers} layers attends once")
    shapes = {(call.num_q_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        raise NotImplementedError("its layers have different heads")
    if calls[0].head_dim != calls[0].value_dim:
        raise NotImplementedError(
            f"its keys have {calls[0].head_dim} numbers a head and its values {calls[0].value_dim}"
        )


def check_model(model: TransformersModel, ops: Ops, expected: Sequence[Tensor]) -> None:
    """
    Raises:
        NotImplementedError: the logits are not ``expected``.
    """
    limit = LIMITS.get(model.dtype, NARROW_LIMIT)
    for got, own in zip(_paged_logits(model, ops, expected[0].device), expected, strict=True):
        distance = (got - own).norm() / (own - own.mean(-1, keepdim=True)).norm()
        if not distance <= limit:
            raise NotImplementedError(
                f"over paged keys and values its logits are off by {distance:.2g} of their size"
            )


def _sequences(spec: ModelSpec) -> list[list[int]]:
    size = min(NUM_TOKENS, spec.max_position_embeddings)
    return [[(step * i + step) % spec.vocab_size for i in range(size)] for step in (7, 11)]


def _paged_logits(model: TransformersModel, ops: Ops, device: torch.device) -> list[Tensor]:
    sequences = _sequences(model.spec)
    size = len(sequences[0])
    steps = (  # rows with one token come first
        (Piece(0, 0, size // 2), Piece(1, 0, size // 3)),
        (Piece(1, size // 3, size // 3 + 1), Piece(0, size // 2, size - 1)),
        (Piece(0, size - 1, size), Piece(1, size // 3 + 1, size)),
    )
    cache_spec = model.kv_cache_spec(len(BLOCKS) * 2, BLOCK_SIZE)
    caches = [ops.allocate_kv_cache(cache_spec, device) for _ in range(model.num_layers)]
    logits: list[list[Tensor]] = [[], []]
    for pieces in steps:
        ids = [token for p in pieces for token in sequences[p.sequence][p.start : p.end]]
        positions = [position for p in pieces for position in range(p.start, p.end)]
        hidden = model.forward(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            caches,
            [_metadata(pieces, device)] * model.num_layers,
        )
        parts = torch.split(model.logits(hidden), [p.end - p.start for p in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            logits[piece.sequence].append(part.clone())
    return [torch.cat(parts) for parts in logits]


def _metadata(pieces: Sequence[Piece], device: torch.device) -> AttentionMetadata:
    sizes = [piece.end - piece.start for piece in pieces]
    ends = [piece.end for piece in pieces]
    slots = [
        BLOCKS[piece.sequence][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for piece in pieces
        for position in range(piece.start, piece.end)
    ]

    def int32(numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return AttentionMetadata(
        query_start_loc=int32([0, *itertools.accumulate(sizes)]),
        seq_lens=int32(ends),
        block_tables=int32([BLOCKS[piece.sequence] for piece in pieces]),
        slot_mapping=torch.tensor(slots, device=device),
        query_lens_host=sizes,
        seq_lens_host=ends,
        max_query_len=max(sizes),
        max_seq_len=max(ends),
        num_decode_rows=sum(size == 1 for size in sizes),
    )
