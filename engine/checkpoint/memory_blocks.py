"""In which blocks of 32 numbers a GGUF file's matrices lie in memory where the kernels multiply blocks.

Says which blocks hold exactly what a file's blocks hold; ``models/reblock.py`` makes them. Must not import torch.
"""

from __future__ import annotations

BLOCK_NUMBERS = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_F32": 24, "Q8_F32": 44}
"""Bytes of a block, as in :class:`~octavo.kernels.ops.QuantizedRows`."""

KEPT_AS: dict[str, tuple[str, ...]] = {
    **{type: (type,) for type in ("Q4_0", "Q4_1", "Q8_0")},
    **dict.fromkeys(("Q5_0", "IQ4_NL"), ("Q8_0",)),
    "Q4_K": ("Q4_F32", "Q8_F32"),
    **dict.fromkeys(("Q3_K", "Q5_K", "Q6_K", "Q5_1", "IQ4_XS"), ("Q8_F32",)),
}
"""Types of blocks in memory by the type in the file, the smallest first; what is not here is widened."""


def kept_bytes(type: str, num_numbers: int) -> int | None:
    """What a matrix takes in memory in its smallest blocks; ``None``: there are none that hold it."""
    if type not in KEPT_AS:
        return None
    return num_numbers // BLOCK_NUMBERS * BLOCK_BYTES[KEPT_AS[type][0]]
