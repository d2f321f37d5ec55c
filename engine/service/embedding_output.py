"""The types of ``LLM.embed``. Must not know how an embedding is computed."""

from __future__ import annotations

from dataclasses import dataclass

from ..api import RequestOutput, unpack_floats


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]  # float32 numbers; empty where there is an error

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None  # why there is none


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """What the engine gave, in the shape of this call."""
    return EmbeddingRequestOutput(
        output.request_id,
        EmbeddingOutput(unpack_floats(output.embedding or b"")),
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.finished,
        output.error,
    )
