"""How a prompt becomes an embedding, with the range of every value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .checks import check_int, refuse

POOLING_TYPES = ("last", "mean")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes one vector, its embedding: of the model's last hidden states.

    Raises:
        InvalidRequestError: a value is out of its range; ``param`` names it.
    """

    pooling_type: str | None = None  # "last": the last token's; "mean": of all; None: the engine's
    dimensions: int | None = None  # only the first so many numbers; None: all of them
    normalize: bool = True  # to length 1, after the cut

    def __post_init__(self) -> None:
        if self.pooling_type not in (None, *POOLING_TYPES):
            got = self.pooling_type
            refuse("pooling_type", f'pooling_type must be "last" or "mean", got {got!r}.')
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions)
            if self.dimensions < 1:
                refuse("dimensions", f"dimensions must be at least 1, got {self.dimensions}.")
        normalize: Any = self.normalize
        if not isinstance(normalize, bool):
            refuse("normalize", f"normalize must be true or false, got {normalize!r}.")
