"""Presets: options in a YAML file, or in one of those that come with octavo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..engine.config.options import flag_of
from ..engine.errors import ConfigError
from .option_values import parse_file_value
from .suggestions import unknown_option


def preset_names() -> list[str]:
    """Bare names that ``--config`` takes."""
    folder = Path(str(files("octavo") / "configs"))
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_preset(name: str, options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """The options of a file, or of a preset by its bare name.

    Args:
        name: A path, or a name out of :func:`preset_names`.
        options: Every option by field name. Keys may be written with - or _.

    Raises:
        ConfigError: no such file, not a YAML mapping, an unknown key or a wrong value.
    """
    path = _find(name)
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        field_name = str(key).replace("-", "_")
        if field_name not in options:
            raise ConfigError(f"{path}: {unknown_option(flag_of(field_name), list(options))}")
        if field_name in values:
            raise ConfigError(f"{path}: {key} is given twice.")
        values[field_name] = parse_file_value(options[field_name], value)
    return values


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if name in preset_names():
        return Path(str(files("octavo") / "configs" / f"{name}.yaml"))
    known = ", ".join(preset_names())
    raise ConfigError(f"--config: {name} is neither a file nor a preset ({known}).")


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--config: {path} cannot be read: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold options, one 'name: value' a line.")
    return content
