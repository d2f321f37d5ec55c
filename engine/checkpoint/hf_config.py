"""``config.json`` of a Hugging Face folder, read into a :class:`ModelSpec`.

Owns the spellings of transformers 4 and 5. ``auto_map`` (code beside the weights) is never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from .families import architectures, family_of
from .fields import Fields
from .rope_config import read_rope, window_of
from .spec import ModelSpec, check_counts, check_spec
from .transformers_config import is_decoder, read_transformers_spec

DTYPES = ("float32", "bfloat16", "float16")
SLIDING, FULL = LAYER_TYPES = ("sliding_attention", "full_attention")


def read_spec(config: Mapping[str, Any], where: str, model_impl: str = "auto") -> ModelSpec:
    """The spec that ``config`` describes. ``where`` is the file, for messages.

    Args:
        model_impl: as ``--model-impl``: ``auto`` is octavo's own for an architecture that has a family.

    Raises:
        CheckpointError: the architecture, activation, rope type or quantisation is not supported, or
            a value is missing or senseless.
    """
    architecture = _architecture(config, where, model_impl)
    is_own = architecture in architectures()
    defaults = family_of(architecture).defaults if is_own else {}
    fields = Fields({**defaults, **config}, where)
    _refuse_quantized(fields)
    if is_own and model_impl != "transformers":
        spec = _family_spec(architecture, fields, where)
    else:
        spec = read_transformers_spec(architecture, fields, _dtype(fields))
    check_spec(spec, where)
    return spec


def _common_spec(architecture: str, fields: Fields) -> ModelSpec:
    """From the keys that mean the same in every family."""
    hidden_size, num_q_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", hidden_size // num_q_heads or None)
    rope = read_rope(fields, head_dim)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=window_of(rope, fields.size("max_position_embeddings")),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=False,
        mlp_bias=False,
        hidden_act=fields.text("hidden_act", "silu"),
        sliding_window=None,
        dtype=_dtype(fields),
    )


def _family_spec(architecture: str, fields: Fields, where: str) -> ModelSpec:
    family, common = family_of(architecture), _common_spec(architecture, fields)
    check_counts(common, where)
    if not family.has_rope_by_kind:
        _refuse_rope_by_kind(fields)
    spec = family.read_config(fields, common)
    if not family.has_partial_rotary:
        _refuse_partial_rotary(fields, spec)
    return spec


def _architecture(config: Mapping[str, Any], where: str, model_impl: str) -> str:
    names = config.get("architectures")
    if not names or not isinstance(names, list):
        raise CheckpointError(f"{where} names no architecture.")
    for name in names:
        if name in architectures():
            return str(name)
    name = Fields({"architectures": names[0]}, where).text("architectures")
    if model_impl != "octavo" and is_decoder(name):
        return name
    more = "" if model_impl == "octavo" else ", and other decoders (...ForCausalLM) by transformers"
    raise CheckpointError(
        f"{where}: architecture {name} is not supported; octavo runs "
        f"{', '.join(architectures())}{more}."
    )


def _refuse_quantized(fields: Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{fields.where}: weights quantised with {method or 'an unnamed method'} are not supported."
        )


def _refuse_rope_by_kind(fields: Fields) -> None:
    """An object for each kind of layer, which would be taken for no parameters at all."""
    given = fields.get("rope_parameters") or {}
    if named := [kind for kind in LAYER_TYPES if kind in given]:
        fields.refuse("rope_parameters", named, "one object for all layers")


def _refuse_partial_rotary(fields: Fields, spec: ModelSpec) -> None:
    """transformers rotates whole heads in most architectures, whatever the key says."""
    for rope in (spec.layer(index).rope for index in range(spec.num_layers)):
        if rope is not None and rope.rotary_dim != spec.head_dim:
            share = rope.rotary_dim / spec.head_dim
            fields.refuse("partial_rotary_factor", share, f"1 for {spec.architecture}")


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        fields.refuse(key, name, f"one of {', '.join(DTYPES)}")
    return name


def read_window(fields: Fields) -> int | None:
    """``sliding_window``; ``None`` where it is null."""
    return None if fields.get("sliding_window") is None else fields.size("sliding_window")


def read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """``layer_types``, one word a layer; ``None``: there is no such key.

    Raises:
        CheckpointError: a word that octavo does not know, or not one for each layer.
    """
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(kind in LAYER_TYPES for kind in kinds):
        fields.refuse("layer_types", kinds, f"a list of {' and '.join(LAYER_TYPES)}")
    if len(kinds) != num_layers:
        fields.refuse("layer_types", kinds, f"{num_layers} words")
    return tuple(kinds)
