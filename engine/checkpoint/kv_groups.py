"""Which layers share block tables: sets of layers that keep their keys and values equally long.

A block of KV memory has room for the same number of layers in every group, so that one pool of blocks
serves them all: a kind of layers that is more numerous takes several groups. Where the numbers do not
divide, a group has fewer layers than a block has room for, and the rest of its blocks is wasted.
"""

from __future__ import annotations

from dataclasses import dataclass

from .spec import ModelSpec

MAX_WASTE = 1 / 16
"""Of a longest sequence's KV memory, for rooms without a layer: fewer groups are less to do in a step."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values lie in the same blocks, and are given back together."""

    window: int | None  # tokens that a query sees, itself included; None: all before it
    layers: tuple[int, ...]  # at most layers_per_block of them


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """The groups of a model, those without a window first. One if all layers are alike."""
    kinds: dict[int | None, list[int]] = {}
    for index in range(spec.num_layers):
        kinds.setdefault(spec.layer(index).window, []).append(index)
    size = _layers_per_block(kinds, spec.max_position_embeddings)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    return tuple(
        KVGroup(window, tuple(layers[begin : begin + size]))
        for window, layers in ordered
        for begin in range(0, len(layers), size)
    )


def layers_per_block(groups: tuple[KVGroup, ...]) -> int:
    """Layers that one block has room for."""
    return max(len(group.layers) for group in groups)


def _layers_per_block(kinds: dict[int | None, list[int]], longest: int) -> int:
    """The most with which a sequence of ``longest`` tokens wastes no more than ``MAX_WASTE``."""
    lengths = {window: min(longest, window or longest) for window in kinds}
    needed = sum(len(layers) * lengths[window] for window, layers in kinds.items())
    for size in range(max(map(len, kinds.values())), 1, -1):
        taken = sum(-(-len(layers) // size) * size * lengths[w] for w, layers in kinds.items())
        if taken <= needed * (1 + MAX_WASTE):
            return size
    return 1
