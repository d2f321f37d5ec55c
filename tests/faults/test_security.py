"""Known faults I: what strangers, other tenants and model folders may not do."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.slow]

C, X = "/v1/completions", "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
ANN, BOB = "sk-ann", "sk-bob"


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.fixture(scope="module")
def open_to_all(
    launch: Callable[..., Any], tiny_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A server on every interface, with two tenants."""
    folder = tmp_path_factory.mktemp("open")
    (folder / "keys").write_text(f"ann {ANN}\nbob {BOB}\n")
    flags = ("--host", "0.0.0.0", "--api-key-file", str(folder / "keys"), "--check-invariants")
    with launch(folder, str(tiny_path), *flags, "--num-gpu-blocks-override", "64") as server:
        server.wait_ready()
        yield server


def ask(server: Any, key: str = ANN, path: str = C, **fields: Any) -> httpx.Response:
    usual = {"max_tokens": 2, "temperature": 0}
    prompt = {"prompt": "hi"} if path == C else {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {key}"}
    body = {**prompt, **usual, **fields}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def test_i01_bytes_of_a_stranger_are_never_unpickled(open_to_all: Any, tmp_path: Path) -> None:
    before = ask(open_to_all).json()["choices"]
    canary = tmp_path / "canary"
    payload = pickle.dumps(Touch(canary))
    port = int(open_to_all.url.rpartition(":")[2])
    for head in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall((head % len(payload) if head else b"") + payload + b"\r\n\r\n")
            assert connection.recv(100).split(b" ")[1] in (b"400", b"401")
    assert not any(path.parent.exists() for path in _sockets_of(open_to_all))  # nobody finds them
    assert ask(open_to_all).json()["choices"] == before
    assert not canary.exists()
    pickle.loads(payload)  # as anyone would have who took it for an object
    assert canary.exists()


def _sockets_of(server: Any) -> list[Path]:
    """The Unix sockets with a name: the one between its processes."""
    names = {str(c.laddr) for process in server.family for c in process.net_connections("unix")}
    found = [Path(name) for name in names if name.startswith("/")]
    assert len(found) == 1
    return found


def test_i01_nothing_in_the_source_runs_what_it_reads() -> None:
    forbidden = re.compile(
        r"^\s*(?:import|from) (?:pickle|dill|cloudpickle|shelve|marshal)\b"
        r"|\b(?:recv_pyobj|send_pyobj|torch\.load|allow_pickle=True)\b|(?<![\w.])(?:eval|exec)\(",
        re.MULTILINE,
    )
    folders = ("octavo", "server", "engine", "kernels")
    files = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if forbidden.search(path.read_text())] == []
    assert forbidden.search("    import pickle\n")
    assert forbidden.search("x = eval(text)")


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ],
)
def test_i06_clients_bring_no_template_and_override_nothing(
    tiny: Any, fields: dict[str, Any]
) -> None:
    answer = tiny.send(X, max_tokens=2, **fields)
    assert answer.status_code == 400, answer.text
    assert next(iter(fields)) in answer.text
    tiny.canary()


ENDLESS = {
    "long": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "deep": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "writes": "{% set _ = messages.append(1) %}{{ messages }}",
}


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_i06_a_template_runs_in_a_sandbox_with_a_bound(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path, name: str
) -> None:
    """The operator's own; what it costs is the operator's fault, and still ends."""
    template = tmp_path / "template.jinja"
    template.write_text(ENDLESS[name])
    with launch(tmp_path, str(tiny_path), "--chat-template", str(template)) as server:
        server.wait_ready()
        answer = ask(server, path=X)
        assert answer.status_code == 400, answer.text
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


def test_i10_nothing_is_fetched_for_a_client(tiny: Any, tmp_path: Path) -> None:
    hits: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        port = listener.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/hit",
            f"http://localhost:{port}/hit",
            f"http://good.test\\@127.0.0.1:{port}/",
            "http://169.254.169.254/",
            "file:///etc/passwd",
            "data:text/plain;base64,aGk=",
        ):
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url}},
                {"type": "file", "file": {"file_id": url}},
            ):
                answer = tiny.send(X, messages=[{"role": "user", "content": [part]}])
                assert answer.status_code == 400
                assert "root:" not in answer.text
        taker = threading.Thread(target=lambda: hits.append(_accepted(listener)))
        taker.start()
        taker.join()
    assert hits == [False]


def _accepted(listener: socket.socket) -> bool:
    """Whether somebody has connected."""
    try:
        listener.accept()
    except TimeoutError:
        return False
    return True


def test_i12_no_tenant_sees_what_another_has_sent(open_to_all: Any) -> None:
    secret = "The plan is this: " + "north, south, " * 12

    def cached(key: str, **fields: Any) -> int:
        answer = ask(open_to_all, key, prompt=secret, **fields)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(ANN) == 0
    assert cached(ANN) > 100
    assert cached(BOB) == 0
    for salt in ("ann", ANN, "bob", "0"):
        assert cached(BOB, cache_salt=salt) == 0
    assert cached(BOB) > 100
    for wrong in ("", 7, ["x"]):
        assert ask(open_to_all, BOB, cache_salt=wrong).status_code == 400


EVIL = "from pathlib import Path\nPath({canary!r}).touch()\n\nclass Evil:\n    pass\n"


@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_i13_no_code_of_a_model_folder_runs(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    model, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(tiny_path, model)
    for name in ("evil.py", "configuration_evil.py", "__init__.py", "sitecustomize.py"):
        (model / name).write_text(EVIL.format(canary=str(canary)))
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = {"auto_map": dict.fromkeys(kinds, "evil.Evil"), "custom_code": True}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = model / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **auto_map}))
    torch.save({"x": Touch(canary)}, model / "pytorch_model.bin")
    with launch(tmp_path, str(model), python=flags) as server:
        server.wait_ready()
        assert ask(server).status_code == 200
        assert ask(server, path=X).status_code == 200
    (model / "model.safetensors").unlink()
    with launch(tmp_path, str(model), python=flags) as server:
        assert server.ends() == 2
        assert "safetensors" in server.said
    assert not canary.exists()


def test_i16_nothing_but_the_api_listens_on_the_network(open_to_all: Any) -> None:
    port = int(open_to_all.url.rpartition(":")[2])
    listening = {
        tuple(connection.laddr)
        for process in open_to_all.family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("0.0.0.0", port)}
    udp = [c for p in open_to_all.family for c in p.net_connections("udp")]
    assert udp == []
