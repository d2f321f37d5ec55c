"""What the layers of a step derive alike from its tensors is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class StepMemo(Generic[Value]):
    """What every layer of a step derives alike from the step's tensors, computed by the first.

    Keyed by the identity of the arguments, which are kept alive until the next step's come. Whoever
    changes such a tensor in place must pass it as another object.
    """

    def __init__(self) -> None:
        self._owners: tuple[object, ...] = ()
        self._values: dict[object, Value] = {}

    def get(self, owners: tuple[object, ...], key: object, compute: Callable[[], Value]) -> Value:
        """The value for ``key`` under ``owners``, compared by identity."""
        same = len(owners) == len(self._owners) and all(
            a is b for a, b in zip(owners, self._owners, strict=True)
        )
        if not same:
            self._owners, self._values = owners, {}
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]
