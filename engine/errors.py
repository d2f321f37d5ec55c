"""The one error tree.

::

    OctavoError
    ├── RequestError                recoverable: one request is answered, the server goes on
    │   ├── InvalidRequestError     the request is wrong (400); names the parameter
    │   │   └── NotSupportedError   a known parameter that octavo does not offer (400)
    │   ├── ModelNotFoundError      no such model is served (404)
    │   └── OverloadedError         too much is queued (429)
    ├── ConfigError                 wrong options or an unusable checkpoint: refuse to start
    │   └── CheckpointError         a model file is missing, damaged or not supported
    ├── EngineNotReadyError         the engine is loading or draining (503)
    └── EngineDeadError             the engine ended; nothing more will come of it (503, then exit)
        └── EngineRefusedError      it never began: options or checkpoint cannot work
"""

from __future__ import annotations

NOTHING_LEFT = "penalties, bias, masks and min_tokens leave no token that could be drawn"
"""Why a sequence failed whose own rules forbid every token: the request's fault, not the model's."""


class OctavoError(Exception):
    """Base of every error that octavo raises on purpose."""


class RequestError(OctavoError):
    """One request cannot be served; every other goes on."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(RequestError, ValueError):
    """The request itself is wrong. ``param`` names the parameter."""


class NotSupportedError(InvalidRequestError):
    """A parameter that clients know and octavo does not offer."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class OverloadedError(RequestError):
    """Too much waits here; the client may retry after ``retry_after_s``.

    ``reason`` names the limit, as the metric of refusals does.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class ConfigError(OctavoError, ValueError):
    """Options that cannot work. The message is one sentence and names the flag."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used: missing, damaged, mis-shaped or of an unknown kind."""


class EngineNotReadyError(OctavoError):
    """The engine is still loading, or is shutting down."""


class EngineDeadError(OctavoError):
    """The engine process or loop ended unexpectedly."""


class EngineRefusedError(EngineDeadError):
    """The engine refused to start: an option or the checkpoint cannot work. The message says which."""
