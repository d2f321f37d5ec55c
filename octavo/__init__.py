"""octavo: an OpenAI-compatible LLM server whose KV cache is managed like virtual memory.

Public names are resolved on first use, so that ``import octavo`` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engine.api import (
        CompletionOutput,
        FinishReason,
        Logprob,
        PoolingParams,
        RequestOutput,
    )
    from .engine.llm import LLM
    from .engine.service.beam_params import (
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
    )
    from .engine.service.embedding_output import EmbeddingOutput, EmbeddingRequestOutput
    from .engine.service.offline_params import SamplingParams
    from .engine.service.offline_prompts import TextPrompt, TokensPrompt

_HOMES = {
    "LLM": "octavo.engine.llm",
    "SamplingParams": "octavo.engine.service.offline_params",
    "TextPrompt": "octavo.engine.service.offline_prompts",
    "TokensPrompt": "octavo.engine.service.offline_prompts",
    "Logprob": "octavo.engine.api",
    "BeamSearchParams": "octavo.engine.service.beam_params",
    "BeamSearchOutput": "octavo.engine.service.beam_params",
    "BeamSearchSequence": "octavo.engine.service.beam_params",
    "RequestOutput": "octavo.engine.api",
    "PoolingParams": "octavo.engine.api",
    "EmbeddingOutput": "octavo.engine.service.embedding_output",
    "EmbeddingRequestOutput": "octavo.engine.service.embedding_output",
    "CompletionOutput": "octavo.engine.api",
    "FinishReason": "octavo.engine.api",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FinishReason",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
