"""Servers and probes for the known faults of such servers. A test's name begins with its case's id.

The embedded model stands behind ``exact`` (float32, comparable with transformers), ``pool`` (a KV pool of
64 blocks) and ``single`` (one seat, a key, comments in silent streams); a tiny random model behind the
others. ``Probe`` asks them, and knows what must hold after every hostile request.

Cases that are not here, and why:

* F08, priorities: tested with the policy itself, in ``tests/scheduling``. What first come, first served
  promises to big and small requests is here.
* F02, C17, times: what must not wait for what is asserted as an order of events; no test fails for its
  wall time.
* F04, half-open connections: a peer that vanishes without a packet cannot be made here. Closed, reset and
  killed clients and a proxy in between are.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

C, X = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class Probe:
    """Asks one server. Requests are greedy unless they say otherwise."""

    def __init__(self, server: Any, key: str = "none") -> None:
        self.server = server
        self.url: str = server.url
        self.key = key
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=256)
        self.http = httpx.Client(base_url=self.url, timeout=180, headers=headers, limits=limits)
        self._first_words: str | None = None

    @staticmethod
    def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        prompt: dict[str, Any] = {"messages": HI} if path.startswith(X) else {"prompt": "hi"}
        return {**prompt, "temperature": 0, **fields}

    def close(self) -> None:
        self.http.close()

    def send(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=self.body(path, fields))

    def ask(self, path: str, **fields: Any) -> Any:
        answer = self.send(path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, **fields: Any) -> str:
        return str(self.ask(C, **fields)["choices"][0]["text"])

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The chunks of a stream, whose bytes are strict UTF-8 and whose end is ``[DONE]``."""
        answer = self.send(path, stream=True, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [part for part in answer.content.decode("utf-8").split("\n\n") if part]
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def parity(self, path: str, **fields: Any) -> tuple[Any, list[Any]]:
        """K3: the whole answer and the chunks of the same request, which say the same."""
        whole = self.ask(path, **fields)
        *chunks, last = self.stream(path, **fields, stream_options={"include_usage": True})
        assert last["choices"] == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == whole["usage"][name]
        for choice in whole["choices"]:
            parts = [p for c in chunks for p in c["choices"] if p["index"] == choice["index"]]
            joined = "".join(map(text_of, parts))
            assert joined == text_of(choice)
            assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [
                choice["finish_reason"]
            ]
            assert parts[-1]["stop_reason"] == choice["stop_reason"]
            assert joined_logprobs(parts) == choice["logprobs"]
        return whole, chunks

    def canary(self) -> None:
        """K1: an ordinary request gets the answer that it got at first."""
        words = self.text(prompt="Hello world", max_tokens=4)
        self._first_words = self._first_words or words
        assert words == self._first_words

    def audit(self, timeout_s: float = 20) -> None:
        """K2: nothing is left of any request."""
        self.wait_idle(timeout_s)
        wait_until(lambda: self.http.get("/load").json() == {"server_load": 0}, timeout_s)
        kv = self.http.get("/debug/kv").json()
        assert kv["sequences"] == []
        assert not any(block["ref_count"] for block in kv["blocks"])
        assert self.metric("octavo:kv_blocks_free") == kv["num_blocks"]

    def wait_idle(self, timeout_s: float = 20) -> None:
        self.server.wait_idle(timeout_s)

    def wait_for(self, name: str, value: float, timeout_s: float = 30) -> None:
        wait_until(lambda: self.metric(name) == value, timeout_s)

    def metric(self, name: str, **labels: str) -> float:
        return float(self.server.metric(name, **labels))

    def connect(self, path: str, *, through: str | None = None, **fields: Any) -> RawStream:
        """K9: a stream over a plain socket, to another address where it is given."""
        body = self.body(path, {**fields, "stream": True})
        return RawStream(through or self.url, self.key, path, body)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what is waited for does not happen"
        time.sleep(0.02)


def text_of(choice: Any) -> str:
    """The text of a whole choice or of a part of one, in either shape."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")


def joined_logprobs(parts: list[Any]) -> Any:
    """The log-probabilities of a stream's parts as one object; ``None`` if there are none."""
    told = [part["logprobs"] for part in parts if part["logprobs"]]
    if not told:
        return None
    lists = {k: [v for one in told for v in one[k]] for k, x in told[0].items() if x is not None}
    return dict(told[0]) | lists


class RawStream:
    """A request written to a socket, and the bytes that come back."""

    def __init__(self, url: str, key: str, path: str, body: dict[str, Any]) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.received = b""
        self.socket.sendall(head.encode() + content)

    def read_until(self, mark: bytes, count: int = 1) -> bytes:
        """Read until ``mark`` came ``count`` times. Returns all that was received."""
        while self.received.count(mark) < count:
            data = self.socket.recv(65536)
            assert data, f"the connection ended before {mark!r}: {self.received[-500:]!r}"
            self.received += data
        return self.received

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close without a farewell: the peer sees a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


# --- the embedded model ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = find_embedded_model()
    if path is None:
        pytest.skip("needs the embedded model")
    return path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(model_path))


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Any:
    """K6: the model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )


@pytest.fixture(scope="session")
def logprobs_of(oracle: Any) -> Callable[[list[int]], Any]:
    """Token ids → ``[len, vocab]`` float32: row i has the log-probabilities of what follows token i."""
    import torch

    def logprobs(token_ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(oracle(torch.tensor([token_ids])).logits[0], dim=-1)

    return logprobs


STRICT = ("--dtype", "float32", "--check-invariants", "--enable-debug-endpoints")


@pytest.fixture(scope="session")
def exact(model_path: Path, start_server: Callable[..., Any]) -> Iterator[Probe]:
    """Eight seats in float32, three names."""
    names = ("--served-model-name", "smol", "alias", "org/smol")
    with (
        start_server(*STRICT, *names, "--max-num-seqs", "8") as running,
        closing(Probe(running)) as probe,
    ):
        yield probe


@pytest.fixture(scope="session")
def pool(model_path: Path, start_server: Callable[..., Any]) -> Iterator[Probe]:
    """K7: 64 blocks of 16 tokens, eight seats, 64 tokens a step."""
    flags = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "64")
    with (
        start_server(*STRICT, *flags, "--max-num-seqs", "8") as running,
        closing(Probe(running)) as probe,
    ):
        yield probe


@pytest.fixture(scope="session")
def single(model_path: Path, start_server: Callable[..., Any]) -> Iterator[Probe]:
    """One seat, behind a key; silent streams get a comment every fifth of a second."""
    flags = ("--max-num-seqs", "1", "--api-key", "sesame", "--sse-keep-alive-interval", "0.2")
    with start_server(*STRICT, *flags) as running, closing(Probe(running, "sesame")) as probe:
        yield probe


# --- a tiny random model --------------------------------------------------------------------------


def write_tiny(
    folder: Path,
    *,
    window: int = 512,
    specials: int = 3,
    more_tokens: dict[str, int] | None = None,
    num_rows: int | None = None,
    nan_token: int | None = None,
    eos: Any = 256,
    generation_eos: Any = None,
    tokenizer_eos: str | None = None,
    special_eos: str | None = None,
    **config: Any,
) -> Path:
    """A Llama of two small layers whose first 256 tokens are bytes; then come the special ones.

    Args:
        more_tokens: special tokens with ids of their own.
        num_rows: of the embedding; absent: one for each token.
        nan_token: a sequence that holds it has logits that are no numbers.
        eos, generation_eos: end ids in config.json and generation_config.json.
        tokenizer_eos, special_eos: the end token of tokenizer_config.json and special_tokens_map.json.
        config: further keys of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"<|special{i}|>" for i in range(specials)]
    added = {name: 256 + i for i, name in enumerate(names)} | (more_tokens or {})
    _write_tokenizer(folder, added)
    vocab = num_rows or max(added.values()) + 1
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "head_dim": 8,
        "max_position_embeddings": window,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": nan_token is None,
        "torch_dtype": "float32",
        "eos_token_id": eos,
        **sizes,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    extra = {} if tokenizer_eos is None else {"eos_token": tokenizer_eos}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **extra}))
    if special_eos is not None:
        text = json.dumps({"eos_token": {"content": special_eos}})
        (folder / "special_tokens_map.json").write_text(text)
    if generation_eos is not None:
        text = json.dumps({"eos_token_id": generation_eos})
        (folder / "generation_config.json").write_text(text)
    save_file(_weights(vocab, nan_token), str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, added: dict[str, int]) -> None:
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["id"] = added[token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(data))


def _weights(vocab: int, nan_token: int | None) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(vocab, 32)}
    if nan_token is not None:
        tensors["lm_head.weight"] = weight(vocab, 32)
        tensors["model.embed_tokens.weight"][:, 0] = 0
        tensors["model.embed_tokens.weight"][nan_token, 0] = 4  # overflows in the first norm
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (32, 32)),
            ("self_attn.k_proj", (16, 32)),
            ("self_attn.v_proj", (16, 32)),
            ("self_attn.o_proj", (32, 32)),
            ("mlp.gate_proj", (64, 32)),
            ("mlp.up_proj", (64, 32)),
            ("mlp.down_proj", (32, 64)),
        ):
            tensors[f"{prefix}.{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(32, np.float32)
    if nan_token is not None:
        tensors["model.layers.0.input_layernorm.weight"][0] = 3e38
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    return tensors


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    return write_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_path: Path, start_server: Callable[..., Any]) -> Iterator[Probe]:
    """The tiny model, whose steps take next to nothing, in a pool of 64 blocks."""
    flags = (str(tiny_path), "--num-gpu-blocks-override", "64", "--max-num-seqs", "8")
    with (
        start_server(*STRICT, *flags, "--log-level", "warning") as running,
        closing(Probe(running)) as probe,
    ):
        yield probe


@pytest.fixture
def poisoned(tmp_path: Path, start_server: Callable[..., Any]) -> Iterator[Probe]:
    """A model whose token 7 makes logits that are no numbers; it takes its time when it is ended."""
    folder = write_tiny(tmp_path / "poisoned", nan_token=7, window=8192)
    flags = ("--shutdown-timeout", "30", "--num-gpu-blocks-override", "600")
    with (
        start_server(str(folder), *STRICT, *flags) as running,
        closing(Probe(running)) as probe,
    ):
        yield probe


@pytest.fixture(scope="session")
def end_softly() -> Callable[[Probe], None]:
    """Tell a server to end, which it does when its running requests have."""

    def end(probe: Probe) -> None:
        os.kill(probe.server.process.pid, signal.SIGTERM)

    return end


# --- servers that are looked at from outside ------------------------------------------------------


class Process:
    """``octavo serve`` on a port of its own, that may never become ready, and all that it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def ends(self, timeout_s: float = 60) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def wait_ready(self, timeout_s: float = 120) -> None:
        wait_until(self._is_ready, timeout_s)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.said
        try:
            return httpx.get(f"{self.url}/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@contextmanager
def launched(
    folder: Path, *flags: str, python: Sequence[str] = (), under: Sequence[str] = (), **environ: str
) -> Iterator[Process]:
    """Start a server whose words go to a file in ``folder``.

    Args:
        python: the interpreter's own flags.
        under: the command that becomes it.
        environ: more of it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*under, sys.executable, "-P", *python, "-m", "octavo", "serve"]
    log = folder / f"{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags],
            env={**os.environ, **environ},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Process(process, f"http://127.0.0.1:{port}", log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


@pytest.fixture(scope="session")
def launch() -> Callable[..., Any]:
    return launched
