"""Which families of models there are: every module of ``models/families/`` that names architectures.

A family says how its configuration is read, and only the engine process computes it: so these modules are
found by name, and bring in no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..models.family import Family

PLACE = "..models.families"


@cache
def families() -> tuple[Family, ...]:
    """Every family, by the name of its file."""
    place = importlib.import_module(PLACE, __package__)
    modules = (
        importlib.import_module(f"{place.__name__}.{found.name}")
        for found in sorted(pkgutil.iter_modules(place.__path__), key=lambda found: found.name)
    )
    return tuple(family for module in modules for family in module.FAMILIES)


def architectures() -> tuple[str, ...]:
    """transformers' class names of all that octavo runs."""
    return tuple(name for family in families() for name in family.architectures)


def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        CheckpointError: octavo does not run it.
    """
    for family in families():
        if architecture in family.architectures:
            return family
    raise CheckpointError(
        f"Architecture {architecture} is not supported; octavo runs {', '.join(architectures())}."
    )
