"""What the layers of a step derive alike from its tensors is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

MAX_OWNERS = 64
"""Between two calls of :meth:`StepMemo.clear`; the oldest are forgotten."""


class StepMemo(Generic[Value]):
    """What layers of a step derive alike from the step's tensors, computed by the first of them.

    Keyed by the identity of the arguments, which are kept alive until the step is over. Whoever
    changes such a tensor in place must pass it as another object.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], tuple[tuple[object, ...], dict[object, Value]]] = {}

    def get(self, owners: tuple[object, ...], key: object, compute: Callable[[], Value]) -> Value:
        """The value for ``key`` under ``owners``, compared by identity."""
        identity = tuple(map(id, owners))
        entry = self._entries.get(identity)
        if entry is None:
            if len(self._entries) == MAX_OWNERS:
                del self._entries[next(iter(self._entries))]
            entry = self._entries[identity] = (owners, {})
        values = entry[1]
        if key not in values:
            values[key] = compute()
        return values[key]

    def clear(self) -> None:
        """The step is over."""
        self._entries.clear()
