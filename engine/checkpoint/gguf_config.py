"""GGUF metadata, read into a :class:`ModelSpec`: the keys that llama.cpp's architectures share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .families import families, family_of
from .fields import Fields
from .gguf_file import QUANTIZED_TYPES, GGUFFile
from .rope_config import ORIGINAL, Scaling, window_of, yarn_attention_factor
from .spec import DEFAULT_ROPE_THETA, ModelSpec, RopeSpec, check_counts, check_spec

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """The spec that the file's metadata describes.

    Raises:
        CheckpointError: the architecture or a feature is not supported, or a value is missing or
            senseless.
    """
    fields = _arch_fields(file)
    architecture = _architecture(file, fields)
    family = family_of(architecture)
    common = _common_spec(architecture, file, fields)
    check_counts(common, str(file.path))
    spec = family.read_gguf(fields, common)
    if family.has_gguf_pairs and spec.rope.rotary_dim != spec.head_dim:
        size = f"the head's size {spec.head_dim}"
        fields.refuse("rope.dimension_count", spec.rope.rotary_dim, size)
    check_spec(spec, str(file.path))
    return spec


def _common_spec(architecture: str, file: GGUFFile, fields: Fields) -> ModelSpec:
    num_q_heads = fields.size("attention.head_count")
    hidden_size = fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden_size // num_q_heads or None)
    if fields.size("attention.value_length", head_dim) != head_dim:
        fields.refuse("attention.value_length", fields.get("attention.value_length"), str(head_dim))
    rope = _rope(file, fields, head_dim)
    return ModelSpec(
        architecture=architecture,
        vocab_size=_vocab_size(file, fields),
        hidden_size=hidden_size,
        num_layers=fields.size("block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.size("attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("feed_forward_length"),
        rms_norm_eps=_norm_eps(fields),
        rope=rope,
        max_position_embeddings=window_of(rope, fields.size("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=any(f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv")),
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        hidden_act="silu",
        sliding_window=None,
        **_storage(file),
    )


def _norm_eps(fields: Fields) -> float:
    """Models with layer norms write it otherwise."""
    key = "attention.layer_norm_epsilon"
    return fields.number(key if fields.get(key) is not None else "attention.layer_norm_rms_epsilon")


def _architecture(file: GGUFFile, fields: Fields) -> str:
    """transformers' name of what llama.cpp calls ``general.architecture``."""
    name = _name(file)
    named = [family for family in families() if family.gguf_architecture == name]
    for family in named:
        if family.accepts_gguf(fields):
            return family.architectures[0]
    if named:
        what = (
            "mixtures of experts" if fields.get("expert_count") is not None else "sliding windows"
        )
        raise CheckpointError(f"{file.path}: {what} are not supported for {name}.")
    known = dict.fromkeys(f.gguf_architecture for f in families() if f.gguf_architecture)
    raise CheckpointError(
        f"{file.path}: architecture {name} is not supported; octavo reads GGUF files of "
        f"{', '.join(known)}."
    )


def _name(file: GGUFFile) -> str:
    return Fields(file.metadata, str(file.path)).text("general.architecture")


def _arch_fields(file: GGUFFile) -> Fields:
    """The keys of the architecture without its name; equal numbers per layer become one."""
    prefix = _name(file) + "."
    values = {
        key.removeprefix(prefix): _one_number(value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    return Fields(values, f"{file.path} ({prefix}*)")


def _one_number(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value


def _vocab_size(file: GGUFFile, fields: Fields) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return fields.size("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None)


def _rope(file: GGUFFile, fields: Fields, head_dim: int) -> RopeSpec:
    rotary_dim = fields.size("rope.dimension_count", head_dim)
    theta = fields.number("rope.freq_base", DEFAULT_ROPE_THETA)
    scaling, attention_factor = _scaling(file, fields, rotary_dim)
    return RopeSpec(theta, rotary_dim, scaling, attention_factor)


def _scaling(file: GGUFFile, fields: Fields, rotary_dim: int) -> Scaling:
    is_old_linear = fields.get("rope.scale_linear") is not None
    kind = fields.text("rope.scaling.type", "linear" if is_old_linear else "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(
            f"{file.path}: rope scaling {kind} is not supported; octavo knows none, linear, yarn and "
            "longrope."
        )
    attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise CheckpointError(f"{file.path}: {ROPE_FACTORS} beside {kind} rope scaling.")
        factors = _factors(file, ROPE_FACTORS, rotary_dim)
        return {"rope_type": "factors", "factors": factors}, attention_factor
    if LONG_FACTORS in file.tensors:
        return _longrope(file, fields, rotary_dim), attention_factor
    if kind == "longrope":
        raise CheckpointError(f"{file.path}: longrope without the tensor {LONG_FACTORS}.")
    if kind == "none":
        return None, attention_factor
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}, attention_factor
    return _yarn(fields, factor), attention_factor * yarn_attention_factor(factor)


def _yarn(fields: Fields, factor: float) -> Mapping[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": True,
        ORIGINAL: _original_window(fields),
    }


def _longrope(file: GGUFFile, fields: Fields, rotary_dim: int) -> Mapping[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": _factors(file, SHORT_FACTORS, rotary_dim),
        "long_factor": _factors(file, LONG_FACTORS, rotary_dim),
        ORIGINAL: _original_window(fields),
    }


def _original_window(fields: Fields) -> int:
    return fields.size("rope.scaling.original_context_length", fields.size("context_length"))


def _factors(file: GGUFFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    """One divisor per frequency: how GGUF files store the scaling of Llama 3.1 and later."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{file.path} lacks the tensor {name}.")
    if tensor.type != "F32" or tensor.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {name} must be F32 of shape {[rotary_dim // 2]}, "
            f"got {tensor.type} of shape {list(tensor.shape)}."
        )
    factors = file.read(name).view("<f4")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{file.path}: {name} holds divisors that are not positive.")
    return tuple(factors.tolist())


def _storage(file: GGUFFile) -> dict[str, Any]:
    """``dtype``, ``is_quantized`` and ``quantization``, from the types of the matrices."""
    types = Counter(t.type for t in file.tensors.values() if len(t.shape) > 1)
    quantized = [name for name, _ in types.most_common() if name in QUANTIZED_TYPES]
    if quantized:
        return {"dtype": "bfloat16", "is_quantized": True, "quantization": quantized[0]}
    commonest = types.most_common(1)[0][0] if types else "F32"
    return {"dtype": _DTYPES[commonest], "is_quantized": False, "quantization": None}
