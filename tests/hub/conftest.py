"""A fake Hub on a port of this machine, an environment that knows no other, and tiny models to put there.

The fake has the routes that the Hub's library asks for, over files in memory. Large files are kept elsewhere, as
on the Hub: a redirect leads to another host's name, where ranges are honoured, and where a transfer can be broken
off or held.

No test here may reach a real Hub: the environment names the fake one, whose port is the machine's own.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, MLP, HEADS, DIM = 32, 64, 4, 8
WORDS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "hi"]
SPECIAL = "<|end|>"
VOCAB = len(WORDS) + 1
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
REPO = "tiny-lab/Tiny-Llama.1"
MATRICES = {
    "self_attn.q_proj": ("attn_q", (HIDDEN, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (HIDDEN, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (HIDDEN, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HIDDEN)),
    "mlp.gate_proj": ("ffn_gate", (MLP, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (MLP, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, MLP)),
}


LARGE = 10_000  # bytes from which a file is kept elsewhere
PIECE = 64 << 10


@dataclass
class Repo:
    """One repository, at one commit per revision."""

    files: dict[str, bytes]
    token: str | None = None  # that one needs to see it
    is_gated: bool = False  # seen by anybody, but not its files
    sizes: dict[str, int] = field(default_factory=dict)  # told in place of the true ones
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch, a tag or a commit."""
        for name, files in {"main": self.files, **self.revisions}.items():
            commit = hashlib.sha1(name.encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        return None


@dataclass
class Request:
    method: str
    path: str
    authorization: str | None
    range: str | None


class FakeHub:
    """What tests see of it: what it has, what it was asked, how it fails."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.status: int | None = None  # of every answer of the API
        self.status_message: str | None = None
        self.break_offs: list[int] = []  # bytes after which the next transfers of large files end
        self.page: bytes | None = None  # in place of every answer
        self.resets = 0  # transfers that end with a reset
        self.held_after: int | None = None  # bytes after which a transfer waits
        self.released = threading.Event()
        self.url = ""

    def transfers(self) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and "/elsewhere/" in r.path]

    @contextmanager
    def running(self, port: int = 0) -> Iterator[FakeHub]:
        hub = self

        class Bound(_Handler):
            fake = hub

        server = ThreadingHTTPServer(("127.0.0.1", port), Bound)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()


def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.fake.requests.append(
            Request(self.command, path, headers.get("Authorization"), headers.get("Range"))
        )
        parts = path.strip("/").split("/")
        if self.fake.page is not None:
            self._send(200, self.fake.page, {"Content-Type": "text/html"})
        elif parts[0] == "elsewhere":
            self._elsewhere(parts[1])
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4], "/".join(parts[5:]))
        else:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _find(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; ``None`` when a refusal has been sent."""
        repo = self.fake.repos.get(repo_id)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        found = None
        if self.fake.status is not None:
            self._refuse(self.fake.status, message=self.fake.status_message)
        elif repo is None or (repo.token is not None and token != repo.token):
            self._refuse(404 if token else 401, "RepoNotFound")
        elif repo.is_gated:
            self._refuse(403 if token else 401, "GatedRepo")
        elif (found := repo.at(revision)) is None:
            self._refuse(404, "RevisionNotFound")
        return found

    def _refuse(self, status: int, code: str | None = None, message: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message or code}
        self._send(status, b"{}", {name: text for name, text in headers.items() if text})

    def _api(self, repo_id: str, route: str, revision: str) -> None:
        found = self._find(repo_id, revision)
        if found is None:
            return
        commit, files = found
        sizes = {name: len(content) for name, content in files.items()}
        sizes |= self.fake.repos[repo_id].sizes
        listed = [
            {"size": sizes[name], "oid": "0" * 40, **_lfs(content, sizes[name])}
            for name, content in files.items()
        ]
        body: Any
        if route == "tree":
            body = [
                {"type": "file", "path": name, **facts}
                for name, facts in zip(files, listed, strict=True)
            ]
        else:
            siblings = [
                {"rfilename": name, **facts} for name, facts in zip(files, listed, strict=True)
            ]
            body = {"id": repo_id, "sha": commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo_id: str, revision: str, name: str) -> None:
        found = self._find(repo_id, revision)
        if found is None:
            return
        commit, files = found
        content = files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit}
        if len(content) < LARGE:
            self._send(200, content, {**headers, "ETag": f'"{etag(content)}"'})
            return
        host = self.fake.url.replace("127.0.0.1", "localhost")
        headers |= {
            "Location": f"{host}/elsewhere/{etag(content)}",
            "X-Linked-ETag": f'"{etag(content)}"',
            "X-Linked-Size": str(len(content)),
        }
        self._send(302, b"", headers)

    def _elsewhere(self, wanted: str) -> None:
        content = next(
            content
            for repo in self.fake.repos.values()
            for files in (repo.files, *repo.revisions.values())
            for content in files.values()
            if etag(content) == wanted
        )
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{wanted}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._transfer(content[start:])

    def _transfer(self, content: bytes) -> None:
        fake = self.fake
        if fake.resets > 0:
            fake.resets -= 1
            self.wfile.write(content[:PIECE])
            self.wfile.flush()
            linger = struct.pack("ii", 1, 0)  # the peer sees a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
            self.close_connection = True
            return
        end = fake.break_offs.pop(0) if fake.break_offs else len(content)
        for at in range(0, min(end, len(content)), PIECE):
            if fake.held_after is not None and at >= fake.held_after:
                fake.released.wait(60)
            self.wfile.write(content[at : min(at + PIECE, end)])
            self.wfile.flush()
        if end < len(content):
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _lfs(content: bytes, size: int) -> dict[str, Any]:
    if len(content) < LARGE:
        return {}
    return {"lfs": {"oid": etag(content), "sha256": etag(content), "size": size, "pointerSize": 1}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeHub()
    with fake.running():
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield fake


@pytest.fixture(scope="session")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN)}
    for layer in range(2):
        for name, (_, shape) in MATRICES.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors | {"model.norm.weight": np.ones(HIDDEN, np.float32)}


def write_config(folder: Path, **changes: object) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": VOCAB - 1,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    """A random Llama as one safetensors file."""
    folder = tmp_path_factory.mktemp("tiny")
    write_config(folder)
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(WORDS)}, merges=[("h", "i")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7}))
    return folder


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> bytes:
    """The same model as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*WORDS, SPECIAL])
    writer.add_token_types([1] * len(WORDS) + [3])
    writer.add_token_merges(["h i"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_add_bos_token(False)
    for name, tensor in weights.items():
        writer.add_tensor(_gguf_name(name), _permuted(name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    index, _, rest = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    short = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    return f"blk.{index}.{short.get(rest) or MATRICES[rest][0]}.weight"


def _permuted(name: str, tensor: np.ndarray) -> np.ndarray:
    """q and k as llama.cpp has them."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    halves = tensor.reshape(HEADS, 2, DIM // 2, HIDDEN)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def repo(hub: FakeHub, model_folder: Path) -> Repo:
    """The model at ``REPO``, beside files that nobody should fetch."""
    files = read_folder(model_folder) | {
        "README.md": b"# Tiny",
        ".gitattributes": b"*.bin filter=lfs",
        "pytorch_model.bin": b"P" * 20_000,
        "original/consolidated.00.pth": b"P" * 20_000,
        "original/params.json": b"{}",
        "onnx/model.onnx": b"O" * 20_000,
        "evil.py": b"raise SystemExit('executed')",
    }
    hub.repos[REPO] = Repo(files)
    return hub.repos[REPO]


@pytest.fixture
def put_gguf(hub: FakeHub, gguf_file: bytes) -> Callable[..., Repo]:
    """``put_gguf(name, ...)``: the GGUF model at ``REPO`` under these names, each with bytes of its own."""

    def put(*names: str) -> Repo:
        files = {name: gguf_file + bytes(i) for i, name in enumerate(names)}
        hub.repos[REPO] = Repo({"README.md": b"# Tiny", **files})
        return hub.repos[REPO]

    return put
