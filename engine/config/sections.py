"""The options in the sections and words of ``--help`` and of the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from .engine_config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from .server_config import ServerConfig


def all_options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option with its section, in the order of ``--help``."""
    for part in (ModelConfig, CacheConfig, SchedulerConfig, ExecutionConfig, ServerConfig):
        for option_field in fields(part):
            yield part.__name__.removesuffix("Config"), option_field


def default_text(option_field: Field[Any]) -> str:
    """What ``--help`` and the documentation print as the default."""
    if option_field.metadata["default_text"]:
        return str(option_field.metadata["default_text"])
    assert option_field.default is not MISSING
    return "off" if option_field.default is False else str(option_field.default)
