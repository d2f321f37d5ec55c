"""The experts of a layer as two tensors of matrices, as transformers 5 keeps them and, where asked, saves them.

``experts.gate_up_proj`` is ``[num_experts, 2 * intermediate_size, hidden_size]``, for each expert its gate
above its up projection; ``experts.down_proj`` is ``[num_experts, hidden_size, intermediate_size]``. Such a
folder calls everything by transformers' names, which are octavo's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..errors import CheckpointError
from .spec import MAX_EXPERTS

_FUSED = re.compile(
    r"(?P<experts>model\.layers\.\d+\.mlp\.experts\.)(?P<kind>gate_up_proj|down_proj)"
)
_MATRIX = re.compile(
    r"(?P<experts>.+\.mlp\.experts\.)(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight"
)


class FusedPlace(NamedTuple):
    """Where one expert's matrix lies."""

    tensor: str  # the folder's name
    expert: int
    part: int  # of the rows of an expert in ``tensor``
    num_parts: int


def fused_place(name: str) -> FusedPlace | None:
    """The place of the tensor that octavo calls ``name``; ``None``: it is no expert's matrix."""
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    experts, expert = match["experts"], int(match["expert"])
    if match["kind"] == "down":
        return FusedPlace(f"{experts}down_proj", expert, 0, 1)
    return FusedPlace(f"{experts}gate_up_proj", expert, int(match["kind"] == "up"), 2)


def split_experts(
    shapes: Mapping[str, tuple[int, ...]], own_name: Callable[[str], str], where: str
) -> dict[str, tuple[int, ...]]:
    """``shapes`` with one entry for each expert's matrices, by the names that other folders have for them.

    Args:
        shapes: of a folder's tensors; without fused ones they stay as they are.
        own_name: from octavo's name to that of other folders.
        where: the folder, for messages.

    Raises:
        CheckpointError: a matrix is there twice.
    """
    if not any(_is_fused(name, shape) for name, shape in shapes.items()):
        return dict(shapes)
    parts: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        for part, part_shape in _parts(name, shape):
            if own_name(part) in parts:
                raise CheckpointError(f"{where} holds the tensor {own_name(part)} twice.")
            parts[own_name(part)] = part_shape
    return parts


def _is_fused(name: str, shape: tuple[int, ...]) -> bool:
    return _FUSED.fullmatch(name) is not None and len(shape) == 3 and shape[0] <= MAX_EXPERTS


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    match = _FUSED.fullmatch(name)
    if match is None or not _is_fused(name, shape):
        yield name, shape
        return
    num_experts, rows, columns = shape
    if match["kind"] == "gate_up_proj":  # an odd number of rows is refused as a shape
        num_rows = {"gate_proj": rows // 2, "up_proj": rows - rows // 2}
    else:
        num_rows = {"down_proj": rows}
    for expert in range(num_experts):
        for kind, num in num_rows.items():
            yield f"{match['experts']}{expert}.{kind}.weight", (num, columns)
