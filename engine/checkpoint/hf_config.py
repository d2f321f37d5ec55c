"""``config.json`` of a Hugging Face folder, read into a :class:`ModelSpec`.

Owns the spellings of transformers 4 and 5. ``auto_map`` (code beside the weights) is never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from .fields import Fields
from .spec import DEFAULT_ROPE_THETA, SUPPORTED_ARCHITECTURES, ModelSpec, RopeSpec, check_spec

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")

_ABSENT: dict[str, dict[str, int]] = {  # what transformers' config class takes for absent keys
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}


def read_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec that ``config`` describes. ``where`` is the file, for messages.

    Raises:
        CheckpointError: the architecture, activation, rope type or quantisation is not supported, or
            a value is missing or senseless.
    """
    architecture = _architecture(config, where)
    fields = Fields({**_ABSENT[architecture], **config}, where)
    _refuse_quantized(fields)
    hidden_size, num_q_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", hidden_size // num_q_heads or None)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, head_dim),
        max_position_embeddings=fields.size("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=architecture == "LlamaForCausalLM" and fields.flag("attention_bias"),
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        hidden_act=fields.text("hidden_act", "silu"),
        sliding_window=_sliding_window(fields, architecture),
        dtype=_dtype(fields),
    )
    check_spec(spec, where)
    return spec


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures")
    if not names or not isinstance(names, list):
        raise CheckpointError(f"{where} names no architecture.")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise CheckpointError(
        f"{where}: architecture {names[0]} is not supported; octavo runs "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _refuse_quantized(fields: Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{fields.where}: weights quantised with {method or 'an unnamed method'} are not supported."
        )


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        fields.refuse(key, name, f"one of {', '.join(DTYPES)}")
    return name


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """Llama has none, whatever its file says; for Mistral, null turns it off."""
    if architecture != "MistralForCausalLM" or fields.get("sliding_window") is None:
        return None
    return fields.size("sliding_window")


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    """From ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (4)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        fields.refuse("rope_parameters", given, "an object")
    rope = Fields(given, f"{fields.where}: rope parameters")
    rope_type = rope.text("rope_type", rope.get("type") or "default")
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"{fields.where}: rope type {rope_type} is not supported; octavo knows "
            f"{', '.join(ROPE_TYPES)}."
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_ROPE_THETA))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1:
        rope.refuse("partial_rotary_factor", share, "at most 1")
    return RopeSpec(theta, int(head_dim * share), _scaling(rope_type, rope, fields))


def _scaling(rope_type: str, rope: Fields, fields: Fields) -> dict[str, Any] | None:
    if rope_type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": rope.number("factor")}
    if rope_type == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            rope.refuse("high_freq_factor", high, f"above low_freq_factor, {low}")
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
        original = "original_max_position_embeddings"
        window = fields.size(original, fields.size("max_position_embeddings"))
        scaling[original] = rope.size(original, window)
    return scaling
