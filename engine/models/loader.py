"""From a checkpoint on disk to a model whose weights are packed for one op set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from ...kernels.ops import Ops
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.families import family_of
from ..checkpoint.spec import ModelSpec
from ..checkpoint.tensors import check_tensors, tensor_shapes
from .model import Model
from .weights import Weights, WeightSource
from .weights_gguf import GGUFWeights
from .weights_safetensors import SafetensorsWeights

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    keep_quantized: bool = False,
) -> Model:
    """Read, convert and pack every weight, one after the other.

    Args:
        dtype: of weights and activations.
        max_model_len: positions that may come; ``None``: all of the model's.
        keep_quantized: use quantised matrices as they are, where the op set can.
        progress: called with ``"loading"`` and the share of tensors read, 0 to 1.

    Raises:
        CheckpointError: the architecture is not supported; a tensor is missing, unexpected or of
            another shape or type, or holds NaN or infinity; a file is damaged.
    """
    spec = checkpoint.spec
    if max_model_len is not None:
        spec = replace(spec, max_position_embeddings=max_model_len)
    if spec.implementation == "transformers":
        from .hf.load import load_transformers_model  # brings in transformers, which takes seconds

        return load_transformers_model(checkpoint, spec, ops, dtype=dtype, device=device)
    _log_rope(spec)
    family = family_of(spec.architecture)
    expected = family.tensor_shapes(spec)

    def on_read(num_read: int) -> None:
        if progress is not None:
            progress("loading", min(1.0, num_read / len(expected)))

    source = open_weights(checkpoint)
    try:
        check_tensors(checkpoint, source.shapes)
        kept = ops.quantized_types if keep_quantized else frozenset()
        weights = Weights(source, dtype, device, on_read, kept)
        model = family.build(spec, weights, ops)
        if isinstance(source, GGUFWeights):
            logger.info("Matrices of %s: %s", source.path, source.storage())
        return model
    finally:
        source.close()


def _log_rope(spec: ModelSpec) -> None:
    """What transformers decides by each sequence's length is decided once here, by the longest."""
    scaling = spec.rope.scaling
    if scaling is not None and scaling["rope_type"] == "longrope":
        original = scaling["original_max_position_embeddings"]
        is_long = spec.max_position_embeddings > original
        logger.info(
            "rope factors for %s contexts: --max-model-len is %d, the original window %d",
            "long" if is_long else "short",
            spec.max_position_embeddings,
            original,
        )


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The tensors of a checkpoint, of either kind.

    Raises:
        CheckpointError: a file is damaged or holds a type that octavo does not read.
    """
    spec, shapes = checkpoint.spec, tensor_shapes(checkpoint)
    family = family_of(spec.architecture)
    if checkpoint.gguf is not None:
        return GGUFWeights(checkpoint.gguf, shapes, spec, family)
    return SafetensorsWeights(checkpoint.path, checkpoint.tensor_files, shapes, spec, family)
