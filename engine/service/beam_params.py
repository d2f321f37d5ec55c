"""The types of ``LLM.beam_search``, and what they are in terms of the engine's own.

Must not know how a beam search is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..api import FinishReason, Logprob, RequestOutput, SamplingParams
from ..errors import InvalidRequestError, NotSupportedError

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search. Names and defaults are the ecosystem's, the semantics transformers'.

    Args:
        beam_width: hypotheses that are kept, and that come back.
        max_tokens: most tokens of one hypothesis.
        ignore_eos: the model's end ids do not end a hypothesis.
        temperature: has no meaning in a beam search; 0 and 1 are accepted.
        length_penalty: a hypothesis scores its log-probability divided by its length to this power.
        early_stopping: ``True`` ends with ``beam_width`` finished hypotheses; ``False`` when the best
            live beam cannot become better than the worst of them at its present length; ``"never"``
            when it cannot at any length.
        include_stop_str_in_output: the text of the id that ended a hypothesis is part of its text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: no end or stop id is chosen before that many.
        stop_token_ids: further ids that end a hypothesis.
        allowed_token_ids: no other token is chosen.
        structured_outputs: not offered.
        watermarking: not offered.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: None = None
    watermarking: None = None

    def sampling_params(self) -> SamplingParams:
        """The same as parameters of ``generate``.

        Raises:
            InvalidRequestError: a value is out of range; ``param`` names it.
        """
        if self.beam_width < 1:
            raise InvalidRequestError(
                f"beam_width must be at least 1, got {self.beam_width}.", param="beam_width"
            )
        for name in ("structured_outputs", "watermarking"):
            if getattr(self, name) is not None:
                raise NotSupportedError(f"{name} is not supported.", param=name)
        return SamplingParams(
            n=self.beam_width,
            logprobs=0,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            allowed_token_ids=self.allowed_token_ids,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis."""

    tokens: list[int]  # the prompt's ids, then the generated ones, an end id included
    cum_logprob: float  # of the generated tokens
    text: str  # the prompt's and the generated
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the generated tokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id that ended it


@dataclass(slots=True)
class BeamSearchOutput:
    """The hypotheses for one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    """What ``generate`` gave with :meth:`BeamSearchParams.sampling_params`, in the other shape."""
    prompt = output.prompt
    if prompt is None:
        prompt = tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *one.token_ids],
                one.cumulative_logprob or 0.0,
                prompt + one.text,
                one.logprobs or [],
                one.finish_reason,
                one.stop_reason,
            )
            for one in output.outputs
        ]
    )
