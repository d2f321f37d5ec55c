"""What the options say of an engine process that ends or is stuck."""

from __future__ import annotations

from typing import NamedTuple


class Supervision(NamedTuple):
    """When an engine process is started again, and when it counts as stuck."""

    max_restarts: int = 10
    heartbeat_timeout_s: float = 60.0
    step_timeout_s: float = 600.0


DEFAULT_SUPERVISION = Supervision()
