"""``SamplingParams`` as scripts use them: their fields may be set, and there are more ways to make them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from .. import api
from ..errors import NotSupportedError


class SamplingType(IntEnum):
    """How tokens are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True, False),  # there never are any
    "structured_outputs": (),
    "guided_decoding": (),
    "logits_processors": ((), []),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "stream_interval": (1,),
    "flat_logprobs": (False,),
    "prompt_logprob_token_ids": ([], ()),
    "extra_args": ({},),
    "watermarking": (False, {}),
    "skip_clone": (True, False),
    "routed_experts_prompt_start": (0,),
}
"""Names that are known elsewhere, and the values besides None that ask for nothing."""


class SamplingParams(api.SamplingParams):
    """How to choose tokens, and when to stop: :class:`octavo.engine.api.SamplingParams`, for scripts.

    A field may be set; the value is checked at once, and nothing changes if it is wrong. A request keeps
    the values that it was given.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # since it can change

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"SamplingParams has no field {name!r}.")
        changed = self.with_changes(**{name: value})
        for one in self.__dataclass_fields__:
            object.__setattr__(self, one, getattr(changed, one))

    def clone(self) -> SamplingParams:
        """A copy that changes by itself."""
        return SamplingParams.of(self)

    @classmethod
    def of(cls, params: api.SamplingParams) -> SamplingParams:
        """``params`` with this class."""
        return cls(**{name: getattr(params, name) for name in params.__dataclass_fields__})

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """From fields of which each may be ``None``, which means its default.

        ``logit_bias`` may have token ids as texts; its values are cut to -100 and 100.

        Raises:
            InvalidRequestError: a value is out of its range.
            NotSupportedError: a field is not offered.
        """
        fields: dict[str, Any] = {}
        for name, value in given.items():
            if name not in cls.__dataclass_fields__:
                _check_neutral(name, value)
            elif value is not None or name == "max_tokens":
                fields[name] = value
        if fields.get("logit_bias") is not None:
            fields["logit_bias"] = _cut_bias(fields["logit_bias"])
        return cls(**fields)

    @property
    def sampling_type(self) -> SamplingType:
        """Whether tokens are drawn, and from a seed that was given."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED


def _check_neutral(name: str, value: Any) -> None:
    if value is None:
        return
    neutral = _NEUTRAL.get(name, ())
    if not any(type(value) is type(one) and value == one for one in neutral):
        raise NotSupportedError(f"{name} is not supported.", param=name)


def _cut_bias(bias: Mapping[Any, float]) -> dict[int, float]:
    return {int(token_id): min(100.0, max(-100.0, value)) for token_id, value in bias.items()}
