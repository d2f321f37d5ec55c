"""Every engine of the comparison: what it computes in, and how it is started.

All get the same number of threads (one for each core this process may use) and, as near as their flags allow,
the same room for keys and values: :data:`KV_GIB` in two bytes a number, that is 46,603 tokens. What else
is set is what makes the peer fast: its own recommendations, or what measured better (docs/comparison.md).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from . import peers
from .forms import model_form

KV_GIB = 1
SERVED_NAME = "m"
_LLAMA_SLOTS = 32
_LLAMA_CONTEXT = 1456 * _LLAMA_SLOTS  # 1 GiB of f16; a slot holds workload D's 1025 tokens
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Engine:
    """One engine in one form. ``{port}`` in the command of a server is filled in at the start."""

    name: str  # "octavo", or the peer's package
    precision: str
    transport: str  # "http" or "in-process"
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}, {self.transport}"


@dataclass(frozen=True)
class Pair:
    """octavo in one form beside a peer in one form."""

    octavo: str
    peer: str
    precision: str  # the peer's
    transport: str


PAIRS = {
    "vllm-bf16": Pair("bf16", peers.VLLM, "bf16", "http"),
    "vllm-q4_1": Pair("q4_1", peers.VLLM, "bf16", "http"),
    "llama-bf16": Pair("bf16", peers.LLAMA, "bf16", "http"),
    "llama-q8_0": Pair("q8_0", peers.LLAMA, "q8_0", "http"),
    "llama-q4_1": Pair("q4_1", peers.LLAMA, "q4_1", "http"),
    "llama-q4_1-int8": Pair("q4_1 int8", peers.LLAMA, "q4_1", "http"),
    "llama-gemma": Pair("gemma", peers.LLAMA, "gemma", "http"),
    "llama-gemma-int8": Pair("gemma int8", peers.LLAMA, "gemma", "http"),
    "openvino-bf16": Pair("bf16", peers.OPENVINO, "bf16", "in-process"),
    "openvino-int8": Pair("q4_1", peers.OPENVINO, "int8", "in-process"),
    "openvino-q4_1": Pair("q4_1", peers.OPENVINO, "q4_1", "in-process"),
}

OCTAVO_FORMS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "q4_1": {"quantization": "auto"},
    "q4_1 int8": {"quantization": "int8"},
    "q8_0": {"quantization": "auto"},
    "gemma": {"quantization": "auto"},
    "gemma int8": {"quantization": "int8"},
    "float32": {"dtype": "float32"},
    "torch bf16": {"dtype": "bfloat16", "attention_backend": "torch"},
}

OWN_FILES = {"q8_0": "q8_0.gguf", "gemma": "gemma.gguf", "gemma int8": "gemma.gguf"}
"""Forms that are not read from the embedded model's own file."""


def octavo(form: str, transport: str, models_dir: Path) -> Engine:
    options: dict[str, str] = {**OCTAVO_FORMS[form], "kv_cache_memory_bytes": f"{KV_GIB}GiB"}
    if form in OWN_FILES:
        options["model"] = str(model_form(OWN_FILES[form], models_dir))
    if transport == "http":
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        command = [sys.executable, "-P", "-m", "octavo", "serve", "--port", "{port}"]
        command += ["--served-model-name", SERVED_NAME, *flags]
    else:
        keywords = {**options, "kv_cache_memory_bytes": KV_GIB * 2**30}
        command = [sys.executable, "-P", str(_HERE / "octavo_worker.py"), json.dumps(keywords)]
    return Engine("octavo", form, transport, tuple(command))


def peer(pair: Pair, peers_dir: Path) -> Engine:
    build = {peers.VLLM: _vllm, peers.LLAMA: _llama, peers.OPENVINO: _openvino}[pair.peer]
    return build(pair.precision, peers_dir)


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _vllm(precision: str, peers_dir: Path) -> Engine:
    """``vllm serve`` looks for a package named vllm and ends; by default one core computes nothing."""
    model = model_form(precision, peers_dir / "models")
    flags = {
        "--host": "127.0.0.1",
        "--port": "{port}",
        "--model": str(model),
        "--served-model-name": SERVED_NAME,
        "--dtype": "bfloat16",
        "--max-model-len": "2048",
        "--max-num-seqs": "64",
        "--generation-config": "vllm",
    }
    command = [str(peers.python_of(peers.VLLM, peers_dir)), "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    preload = [peers_dir / peers.VLLM / "lib" / "libiomp5.so", *tcmalloc(peers_dir)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    words = [word for flag in flags.items() for word in flag]
    return Engine(peers.VLLM, precision, "http", (*command, *words), tuple(environment.items()))


def tcmalloc(peers_dir: Path) -> list[Path]:
    """The allocator that vLLM recommends, where the system or ``peers_dir/lib`` has it."""
    folders = [peers_dir / "lib", Path("/usr/lib"), Path("/usr/lib64")]
    found = [path for folder in folders for path in folder.rglob("libtcmalloc_minimal.so.4")]
    return found[:1]


def _llama(precision: str, peers_dir: Path) -> Engine:
    model = model_form(f"{precision}.gguf", peers_dir / "models")
    flags = {
        "--host": "127.0.0.1",
        "--port": "{port}",
        "--model": str(model),
        "--alias": SERVED_NAME,
        "--threads": str(len(cores())),
        "--threads-batch": str(len(cores())),
        "--parallel": str(_LLAMA_SLOTS),
        "--ctx-size": str(_LLAMA_CONTEXT),
        "--cache-ram": "0",  # one more cache of prompts, in other memory
    }
    words = [word for flag in flags.items() for word in flag]
    command = (str(peers.llama_binary(peers_dir)), "--cont-batching", *words)
    return Engine(peers.LLAMA, precision, "http", command)


def _openvino(precision: str, peers_dir: Path) -> Engine:
    """It reads no bfloat16 GGUF: float16 weights, computed in bfloat16."""
    form = {"bf16": "f16.gguf", "int8": "q8_0.gguf", "q4_1": "q4_1.gguf"}[precision]
    options = {
        "model": str(model_form(form, peers_dir / "models")),
        "precision": "bf16",
        "num_threads": len(cores()),
        "kv_gib": KV_GIB,
        "max_num_batched_tokens": 2048,
    }
    python = peers.python_of(peers.OPENVINO, peers_dir)
    command = (str(python), str(_HERE / "openvino_worker.py"), json.dumps(options))
    return Engine(peers.OPENVINO, precision, "in-process", command)
