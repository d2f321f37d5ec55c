"""How log lines look, in the front end and in the engine process: text, or one JSON object each.

A line that is written while a request is handled carries the request's id. Lines never hold keys, prompts or
outputs: nobody hands them any.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that is being handled."""


_ESCAPES = {
    code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}
"""Of characters that end a line, or that a terminal obeys."""


def one_line(text: str) -> str:
    """``text`` on one line: a path in it may hold whatever would make a second one that nobody wrote."""
    return text.translate(_ESCAPES)


def set_up_logging(level: str, form: str, process: str) -> None:
    """Write lines to stderr from ``level`` on.

    Args:
        form: "text" or "json".
        process: Which one writes, in every line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(process) if form == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text, of_request = one_line(super().formatMessage(record)), request_id.get()
        return text if of_request is None else f"{text} [{of_request}]"


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (of_request := request_id.get()) is not None:
            fields["request_id"] = of_request
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
