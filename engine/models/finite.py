"""Whether the numbers of a checkpoint are numbers, before a model is made of them.

One NaN or infinity in a matrix makes the logits of every row that meets it senseless: the server would start,
and fail its requests one by one. Every tensor that is read is looked at, as it lies in its file:

* numbers by their sum. What is added to a NaN or an infinity never makes it finite again, and a sum reads
  memory once, where ``isfinite`` also writes as many flags. A sum that overflows is looked at closely;
* blocks of quantised numbers by the float16 scales in each. The rest of a block is whole numbers.

That is a pass over memory that is read anyway, about 1% of the processor time of a start with the embedded
model; so nothing is left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from ..checkpoint.gguf_file import BLOCK_LAYOUTS
from ..checkpoint.tensors import listed
from ..errors import CheckpointError

_EXPONENT = 0x7C00  # bits of a float16; all are set in NaN and infinity alone
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where the float16 numbers of a block lie, in bytes from its start."""


def not_finite(path: Path, name: str) -> CheckpointError:
    """The error for the tensor ``name`` in the file ``path``."""
    return CheckpointError(f"{path}: {listed([name])} holds NaN or infinity.")


def is_finite(values: Tensor) -> bool:
    """Whether all of ``values``, of any shape and floating-point type, are finite."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def are_scales_finite(data: Tensor, type: str) -> bool:
    """As :func:`is_finite` for the numbers that blocks stand for.

    Args:
        data: ``[num_bytes]`` uint8.
        type: a key of :data:`SCALES`.
    """
    halves = data.numpy().view(np.int16).reshape(-1, BLOCK_LAYOUTS[type][1] // 2)
    columns = (np.ascontiguousarray(halves[:, start // 2]) for start in SCALES[type])
    return all(bool(((column & _EXPONENT) < _EXPONENT).all()) for column in columns)
