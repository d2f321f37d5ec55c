"""What every route shares: the engine, the served names, and the gate in front of generation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..engine.api import Engine
from ..engine.errors import ModelNotFoundError
from .drain import Drain
from .fields import UnknownFields
from .metrics import Metrics


@dataclass(frozen=True)
class Context:
    """The application's collaborators."""

    engine: Engine
    model_names: tuple[str, ...]
    metrics: Metrics
    drain: Drain
    keep_alive_interval_s: float = 0.0  # of silent streams; 0: no comments
    request_timeout_s: float = 0.0  # 0: requests take as long as they take
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]

    def check_accepting(self) -> None:
        """Return if generation requests are accepted now.

        Raises:
            EngineNotReadyError, EngineDeadError: they are not.
        """
        self.drain.check_accepting()
        self.engine.check_accepting()

    def check_ready(self) -> None:
        """Return if a load balancer should send requests here.

        Raises:
            EngineNotReadyError, EngineDeadError: it should not.
        """
        self.drain.check_ready()
        self.engine.check_ready()

    def check_model(self, name: str | None) -> None:
        """Accept a served name; null, absent and empty mean the served model.

        Raises:
            ModelNotFoundError: any other name.
        """
        if name and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ModelNotFoundError(
                f"The model {name[:200]!r} does not exist. Served here: {served}."
            )
