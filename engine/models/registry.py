"""Which file computes which architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...kernels.ops import Ops
from ..checkpoint.spec import ModelSpec
from ..errors import CheckpointError
from . import llama
from .model import Model
from .weights import Weights


@dataclass(frozen=True)
class Family:
    """What a family's file offers."""

    tensor_shapes: Callable[[ModelSpec], Mapping[str, tuple[int, ...]]]
    is_ignored: Callable[[ModelSpec, str], bool]  # tensors that may stay unread
    build: Callable[[ModelSpec, Weights, Ops], Model]


LLAMA = Family(llama.tensor_shapes, llama.is_ignored, llama.Llama)

FAMILIES = {"LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA}
"""By transformers' class name."""


def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        CheckpointError: octavo does not run it.
    """
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"Architecture {architecture} is not supported; octavo runs {', '.join(FAMILIES)}."
        )
    return FAMILIES[architecture]
