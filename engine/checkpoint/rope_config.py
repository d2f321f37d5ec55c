"""Rotary embedding as ``config.json`` describes it, in the spellings of transformers 4 and 5.

What transformers derives from other keys (attention factors, original windows) is derived here, so that a
:class:`RopeSpec` says all that :mod:`..models.rotary` needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .fields import MAX_SIZE, Fields
from .spec import DEFAULT_ROPE_THETA, RopeSpec

ORIGINAL = "original_max_position_embeddings"

Scaling = tuple[Mapping[str, Any] | None, float]
"""``RopeSpec.scaling`` and the attention factor."""


class _Source(NamedTuple):
    """Where the parameters of one way to rotate are written."""

    rope: Fields
    config: Fields
    rotary_dim: int

    def original_window(self) -> int:
        """Positions that the model was first trained on: transformers lets the outer key win."""
        return self.config.size(
            ORIGINAL, self.rope.size(ORIGINAL, self.config.size("max_position_embeddings"))
        )

    def factor(self) -> float:
        """How much longer the window became, if it is not written."""
        ratio = self.config.size("max_position_embeddings") / self.original_window()
        return self.rope.number("factor", ratio)


def read_rope(fields: Fields, head_dim: int) -> RopeSpec:
    """From ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (4).

    Raises:
        CheckpointError: the type is not supported, or a value is missing or senseless.
    """
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        fields.refuse("rope_parameters", given, "an object")
    rope = Fields(given, f"{fields.where}: rope parameters")
    rope_type = _type(rope)
    if rope_type not in _READERS:
        raise CheckpointError(
            f"{fields.where}: rope type {rope_type} is not supported; octavo knows "
            f"{', '.join(_READERS)}."
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_ROPE_THETA))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1:
        rope.refuse("partial_rotary_factor", share, "at most 1")
    rotary_dim = int(head_dim * share)
    scaling, attention_factor = _READERS[rope_type](_Source(rope, fields, rotary_dim))
    return RopeSpec(theta, rotary_dim, scaling, attention_factor)


def _type(rope: Fields) -> str:
    """The first files of Phi-3 called long rope otherwise."""
    rope_type = rope.text("rope_type", rope.get("type") or "default")
    is_longrope = rope_type == "su" or (rope_type == "yarn" and rope.get("long_factor"))
    return "longrope" if is_longrope else rope_type


def window_of(rope: RopeSpec, max_position_embeddings: int) -> int:
    """Positions that the model is for. Files that turn YaRN on often leave the window as it was."""
    scaling = rope.scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return max_position_embeddings
    return max(max_position_embeddings, int(min(scaling["factor"] * scaling[ORIGINAL], MAX_SIZE)))


def _default(source: _Source) -> Scaling:
    return None, 1.0


def _linear(source: _Source) -> Scaling:
    return {"rope_type": "linear", "factor": source.rope.number("factor")}, 1.0


def _dynamic(source: _Source) -> Scaling:
    """NTK scaling starts past ``max_position_embeddings``, which octavo never passes: up to there,
    frequencies are plain."""
    source.rope.number("factor")
    return None, 1.0


def _llama3(source: _Source) -> Scaling:
    rope = source.rope
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", high, f"above low_freq_factor, {low}")
    scaling = {
        "rope_type": "llama3",
        "factor": rope.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        ORIGINAL: source.original_window(),
    }
    return scaling, 1.0


def _yarn(source: _Source) -> Scaling:
    rope, factor = source.rope, source.factor()
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
        ORIGINAL: source.original_window(),
    }
    default = yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = yarn_attention_factor(factor, rope.number("mscale"))
        default /= yarn_attention_factor(factor, rope.number("mscale_all_dim"))
    return scaling, rope.number("attention_factor", default)


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Peng et al., 2023 (arXiv 2309.00071, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(source: _Source) -> Scaling:
    rope, factor, original = source.rope, source.factor(), source.original_window()
    if original == 1:
        rope.refuse(ORIGINAL, original, "more than 1")
    scaling = {
        "rope_type": "longrope",
        "short_factor": _factors(rope, "short_factor", source.rotary_dim),
        "long_factor": _factors(rope, "long_factor", source.rotary_dim),
        ORIGINAL: original,
    }
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return scaling, rope.number("attention_factor", default)


def _factors(rope: Fields, key: str, rotary_dim: int) -> tuple[float, ...]:
    """One divisor per frequency."""
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        rope.refuse(key, values, f"a list of {rotary_dim // 2} numbers")
    return tuple(Fields({key: value}, rope.where).number(key) for value in values)


_READERS: dict[str, Callable[[_Source], Scaling]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
