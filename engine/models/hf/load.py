"""From a folder to a transformers model over paged keys and values.

Only classes that the installed transformers has are used, chosen by ``model_type`` and ``architectures``; code
beside the weights is never looked at.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ....kernels.ops import Ops
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.fields import read_json
from ...checkpoint.spec import ModelSpec
from ...checkpoint.tensors import listed
from ...errors import CheckpointError
from ..finite import is_finite, not_finite
from .attention import NAME, PagedAttention
from .check import check_model, own_logits, spec_of
from .layers import GivenHidden, PackedHead, pack
from .model import Parts, TransformersModel

transformers_log: Any = logging

UNUSED_KEYS = (
    *("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation"),
    *("transformers_weights", "_name_or_path"),
)
"""Keys of ``config.json`` that choose code or files."""

NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_transformers_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> TransformersModel:
    """Build, fill and try the model.

    Raises:
        CheckpointError: transformers has no such decoder; its weights do not fit; or what it computes over paged
            keys and values, in pieces and beside another sequence, is not what it computes by itself.
    """
    where = str(checkpoint.path / "config.json")
    config, model_class = _classes(checkpoint, spec, where)
    with _quiet(), _refusing(where, spec.architecture, "cannot be built"):
        causal = _filled(checkpoint, config, model_class, dtype).to(device).eval()
    num_parameters = sum(math.prod(parameter.shape) for parameter in causal.parameters())
    with torch.inference_mode(), _refusing(where, spec.architecture, "does not run so"):
        expected = own_logits(causal, spec)
        parts = _take_apart(causal, ops, dtype)
        model = TransformersModel(
            spec_of(causal.config, parts.base, parts.attention, spec, device),
            parts,
            dtype=dtype,
            num_parameters=num_parameters,
        )
        check_model(model, ops, expected)
    return model


def _classes(checkpoint: Checkpoint, spec: ModelSpec, where: str) -> tuple[Any, Any]:
    """The configuration and the class with the head."""
    values = read_json(checkpoint.path / "config.json")
    model_type, name = str(values.get("model_type")), spec.architecture
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name != known or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{where}: transformers {transformers.__version__} has no {name} for the model type {model_type}; "
            "code that comes with a model is never run."
        )
    model_class = getattr(transformers, name)
    if not model_class.is_backend_compatible():
        raise CheckpointError(
            f"{where}: {name} does not let its attention be replaced (transformers {transformers.__version__} says "
            "that it supports no attention back end), which octavo needs to run it."
        )
    kept = {key: value for key, value in values.items() if key not in UNUSED_KEYS}
    with _refusing(where, name, "has a configuration that transformers does not take"):
        config = CONFIG_MAPPING[model_type].from_dict(kept)
    _check_sizes(config, spec, where)
    return config, model_class


def _check_sizes(config: Any, spec: ModelSpec, where: str) -> None:
    """The front end admits requests by what it read."""
    if config.vocab_size != spec.vocab_size:
        raise CheckpointError(
            f"{where}: vocab_size is {spec.vocab_size} here and {config.vocab_size} to transformers."
        )


def _filled(checkpoint: Checkpoint, config: Any, model_class: Any, dtype: torch.dtype) -> Any:
    """The model with its weights, all of them and no others."""
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(_tensors(checkpoint.tensor_files)),
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
    )
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        if info[kind]:
            subject = checkpoint.path if kind == "missing_keys" else type(model).__name__
            raise CheckpointError(f"{subject} {what} {listed(sorted(info[kind]))}.")
    if info["mismatched_keys"]:
        names = sorted(str(key[0]) for key in info["mismatched_keys"])
        raise CheckpointError(f"{checkpoint.path}: {listed(names)} has another shape.")
    return model


def _tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """The folder's own tensors, mapped.

    Raises:
        CheckpointError: a file is damaged, or a tensor holds NaN or infinity.
    """
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor: Tensor = opened.get_tensor(name)
                    if tensor.dtype in NUMBERS and not is_finite(tensor):
                        raise not_finite(path, name)
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged or too short: {error}.") from error


def _take_apart(causal: Any, ops: Ops, dtype: torch.dtype) -> Parts:
    """Layers and head by themselves, with octavo's ops and attention in them.

    Raises:
        NotImplementedError: the class is not made of layers and a linear head.
    """
    base, head = causal.base_model, causal.get_output_embeddings()
    if base is causal or "position_ids" not in inspect.signature(base.forward).parameters:
        raise NotImplementedError("its layers take no position_ids")
    if type(head) is not nn.Linear or any(module is head for module in base.modules()):
        raise NotImplementedError("its head is no linear layer above the others")
    causal.set_attn_implementation(NAME)
    pack(causal, ops, dtype, head)
    name = next(name for name, module in causal.named_modules() if module is head)
    causal.set_submodule(name, PackedHead(head, ops))
    attention, given = PagedAttention(ops), GivenHidden()
    attention.attach(base)
    setattr(causal, causal.base_model_prefix, given)
    return Parts(base, causal, given, attention)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bar."""
    is_shown = transformers_log.is_progress_bar_enabled()
    transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            transformers_log.enable_progress_bar()


@contextmanager
def _refusing(where: str, architecture: str, what: str) -> Iterator[None]:
    """Whatever a class of transformers raises, in one sentence. It knows its own reasons: any may come."""
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"{where}: {architecture} {what} through transformers: {reason}."
        ) from error
