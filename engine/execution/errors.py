"""The error of a plan that contradicts what the executor knows."""

from __future__ import annotations

from ..errors import OctavoError


class ExecutionError(OctavoError):
    """A broken plan: scheduler and executor disagree. The engine must not go on."""
