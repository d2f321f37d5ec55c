"""``config.json`` of a model that transformers' own code computes, as far as the front end needs it.

Nothing here imports transformers. The engine process, which does, checks the numbers against the model that
it builds, and knows better how each layer attends: :mod:`..models.hf`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from .fields import Fields
from .spec import DEFAULT_ROPE_THETA, ModelSpec, RopeSpec

DECODER_NAMES = ("ForCausalLM", "LMHeadModel")
"""How transformers' classes of decoders with a head end."""

LAYER_TYPES = ("sliding_attention", "full_attention")
MOVING_ROPE = ("dynamic", "longrope", "su")
"""Angles that transformers chooses by the longest sequence of a batch: a row's numbers would depend on its company."""

PARTS = ("vision_config", "audio_config", "text_config")

INSTALL = "pip install 'octavo[transformers]'"

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
}


def read_transformers_spec(architecture: str, fields: Fields, dtype: str) -> ModelSpec:
    """Size and window of a decoder that octavo has no family for, or is asked to run so.

    Raises:
        CheckpointError: transformers is not installed; a size is missing; or the configuration asks for what
            cannot be batched over paged keys and values.
    """
    where = fields.where
    _refuse_uninstalled(architecture, where)
    _refuse_by_keys(fields)
    hidden_size, num_layers, num_heads, positions = (_size(fields, name) for name in _NAMES)
    head_dim = fields.size("head_dim", hidden_size // num_heads or None)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size", 4 * hidden_size),
        rms_norm_eps=1e-6,
        rope=RopeSpec(DEFAULT_ROPE_THETA, head_dim - head_dim % 2),
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        sliding_window=None,
        dtype=dtype,
        implementation="transformers",
    )


def is_decoder(architecture: object) -> bool:
    """Whether a class of transformers may be a decoder with a head, by its name."""
    return isinstance(architecture, str) and architecture.endswith(DECODER_NAMES)


def _size(fields: Fields, name: str) -> int:
    known = [key for key in _NAMES[name] if fields.get(key) is not None]
    return fields.size(known[0] if known else name)


def _refuse_uninstalled(architecture: str, where: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            f"{where}: {architecture} runs through transformers, which is not installed: {INSTALL}."
        )


def _refuse_by_keys(fields: Fields) -> None:
    """What a configuration says of itself."""
    reason = _reason(fields)
    if reason is not None:
        raise CheckpointError(
            f"{fields.where}: {reason}, which octavo does not run through transformers."
        )


def _reason(fields: Fields) -> str | None:
    parts = [key for key, value in fields.values.items() if _is_part(key, value)]
    if fields.get("is_encoder_decoder"):
        return "the model is an encoder and a decoder"
    if parts:
        return f"the model has parts of its own ({', '.join(parts)})"
    if fields.get("kv_lora_rank") is not None:
        return "the model has multi-head latent attention (kv_lora_rank)"
    if fields.get("alibi") or fields.get("position_embedding_type") == "alibi":
        return "the model's positions lie in its attention mask (ALiBi)"
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            fields.refuse("layer_types", kinds, "a list of words")
        other = [kind for kind in kinds if kind not in LAYER_TYPES]
        if other:
            return f"the model has layers of type {other[0]}"
    for rope in _rope_parameters(fields):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in MOVING_ROPE:
            return f"the model's rope type {kind} follows the longest sequence of a batch"
    return None


def _is_part(key: str, value: object) -> bool:
    """A model inside the model: text_config, vision_config and their like."""
    return key in PARTS or (
        key.endswith("_config") and isinstance(value, dict) and "model_type" in value
    )


def _rope_parameters(fields: Fields) -> list[Mapping[str, Any]]:
    """All there are, whether one for the model or one for each type of layer."""
    found: list[Mapping[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        given = fields.get(key) or {}
        if not isinstance(given, dict):
            fields.refuse(key, given, "an object")
        found += [given, *(value for value in given.values() if isinstance(value, dict))]
    return found
