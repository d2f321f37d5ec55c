"""The one interface that callers of the engine see: requests in, outputs back.

Owns the types that cross between the server (or a script) and the engine. Standard library only, so
that they work on a bare machine. Must not know what is behind the interface: no tokens tables,
blocks, sequences or tensors. What stands here is public; the files below it are its own.
"""

from .engine import Engine, RequestStream
from .engine_info import EngineInfo, LoadProgress
from .kv_snapshot import KVBlock, KVSequence, KVSnapshot
from .local_model import LocalModel
from .output import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    unpack_floats,
)
from .pooling_params import POOLING_TYPES, PoolingParams
from .request import (
    MAX_CACHE_SALT_CHARS,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    RenderedRequest,
    ResumedSequence,
    TextPrompt,
    TokensPrompt,
)
from .sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BEAM_STOP_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_CHARS",
    "MAX_BEAM_STOP_TOKEN_IDS",
    "MAX_CACHE_SALT_CHARS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_N",
    "MAX_STOP_STRINGS",
    "MAX_STOP_STRING_CHARS",
    "MAX_STOP_TOKEN_IDS",
    "POOLING_TYPES",
    "ChatPrompt",
    "CompletionOutput",
    "Engine",
    "EngineInfo",
    "FinishReason",
    "GenerationRequest",
    "KVBlock",
    "KVSequence",
    "KVSnapshot",
    "LoadProgress",
    "LocalModel",
    "Logprob",
    "PoolingParams",
    "Prompt",
    "RenderedRequest",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "ResumedSequence",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "unpack_floats",
]
