"""``octavo serve ORG/NAME`` and ``LLM("ORG/NAME")`` against a fake Hub, from the first byte to an answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.api import Engine
from octavo.engine.errors import CheckpointError, ConfigError
from octavo.engine.service.fetching import FetchingEngine

if TYPE_CHECKING:
    from tests.hub.conftest import FakeHub, Repo

REPO = "tiny-lab/Tiny-Llama.1"
TOKEN = "hf_secretsecretsecret"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TIMEOUT_S = 90.0


class Serving:
    """``octavo serve`` as a process, from its first moment on."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log = folder / f"log-{port}"
        command = [sys.executable, "-P", "-m", "octavo", "serve", *arguments, "--port", str(port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def get(self, path: str) -> httpx.Response:
        self.wait_for(lambda: "listening on" in self.text())
        return self.http.get(path)

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.get("/ready").status_code == 200)

    def wait_downloading(self, hub: FakeHub) -> list[psutil.Process]:
        """Until a transfer has begun. Returns the processes that the server has started."""
        self.wait_for(hub.transfers)
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., Any]:
    @contextmanager
    def run(*arguments: str) -> Iterator[Serving]:
        server = Serving(tmp_path, *arguments)
        try:
            yield server
        finally:
            server.http.close()
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()

    return run


def test_everything_of_an_engine_is_passed_on() -> None:
    names = {name for name in vars(Engine) if not name.startswith("_")}
    assert names <= set(vars(FetchingEngine))


@pytest.mark.slow
def test_a_model_is_fetched_while_the_port_answers(
    hub: FakeHub,
    repo: Repo,
    serving: Any,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    repo.token = TOKEN
    hub.held_after = 64 << 10
    ask = {"model": REPO, "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with serving(REPO, "--log-level", "debug") as server:
        server.wait_downloading(hub)
        assert server.get("/health").status_code == 200
        told = server.get("/ready")
        assert told.status_code == 503
        assert told.json()["stage"] == "downloading"
        assert "downloaded" in told.json()["error"]["message"]
        assert server.http.post("/v1/completions", json=ask).status_code == 503
        assert server.get("/v1/models").json()["data"][0]["id"] == REPO
        assert server.get("/metrics").status_code == 200
        hub.released.set()
        server.wait_ready()
        card = server.get(f"/v1/models/{REPO}").json()
        assert card["default_sampling_params"] == {"temperature": 0.5, "top_k": 7}
        answer = server.http.post("/v1/completions", json=ask).json()
        assert answer["model"] == REPO
        chat = {"model": REPO, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
        assert "octavo: downloading\n" in server.text()
        assert TOKEN not in server.text()
        assert server.end() == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serving(REPO, "--served-model-name", "tiny") as server:
        server.wait_ready()
        assert server.get("/v1/models").json()["data"][0]["id"] == "tiny"
        again = server.http.post("/v1/completions", json={**ask, "model": "tiny"}).json()
        assert "comes from the cache" in server.text()
    with LLM(str(model_folder)) as llm:
        (local,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    texts = [one["choices"][0]["text"] for one in (answer, again)]
    assert texts == [local.outputs[0].text] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_download(hub: FakeHub, repo: Repo, serving: Any, number: int) -> None:
    hub.held_after = 0
    with serving(REPO) as server:
        children = server.wait_downloading(hub)
        assert children
        assert server.get("/health").status_code == 200
        assert server.end(number) == 0
        assert psutil.wait_procs(children, TIMEOUT_S)[1] == []


@pytest.mark.slow
def test_a_download_does_not_outlive_a_front_end_that_is_killed(
    hub: FakeHub, repo: Repo, serving: Any
) -> None:
    hub.held_after = 0
    with serving(REPO) as server:
        children = server.wait_downloading(hub)
        assert children
        server.end(signal.SIGKILL)
        assert psutil.wait_procs(children, TIMEOUT_S)[1] == []


@pytest.mark.slow
def test_what_cannot_be_had_is_one_sentence_and_status_2(hub: FakeHub, serving: Any) -> None:
    with serving("tiny-lab/absent") as server:
        assert server.process.wait(TIMEOUT_S) == 2
        last = server.text().splitlines()[-1]
        assert re.match(r"octavo: There is no model at tiny-lab/absent here and no repo", last)
        assert "Traceback" not in server.text()


@pytest.mark.slow
def test_a_download_process_that_dies_is_told(hub: FakeHub, repo: Repo, serving: Any) -> None:
    hub.held_after = 0
    with serving(REPO) as server:
        for child in server.wait_downloading(hub):
            os.kill(child.pid, signal.SIGKILL)
        assert server.process.wait(TIMEOUT_S) == 2
        assert f"octavo: The download of {REPO} ended early, with status -9; start" in server.text()


@pytest.mark.slow
def test_the_offline_class_fetches_too(
    hub: FakeHub, repo: Repo, model_folder: Path, tmp_path: Path
) -> None:
    with LLM(str(model_folder)) as llm:
        (local,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    repo.revisions["v2"] = repo.files
    with LLM(REPO, revision="v2", download_dir=str(tmp_path / "there")) as llm:
        (fetched,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert fetched.outputs[0].token_ids == local.outputs[0].token_ids
    assert (tmp_path / "there" / "models--tiny-lab--Tiny-Llama.1").is_dir()
    with pytest.raises(CheckpointError, match="no revision v9"):
        LLM(REPO, revision="v9")


@pytest.mark.slow
def test_the_offline_class_takes_a_gguf_file_of_several(
    hub: FakeHub, put_gguf: Callable[..., Repo], model_folder: Path
) -> None:
    put_gguf("tiny-F16.gguf", "tiny-F32.gguf")
    with LLM(str(model_folder)) as llm:
        (local,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    with LLM(f"{REPO}:f32") as llm:
        (fetched,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert fetched.outputs[0].token_ids == local.outputs[0].token_ids


def test_a_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--revision is for a repository of the Hub"):
        LLM(str(tmp_path), revision="main")


def test_a_local_model_never_brings_the_hubs_library(model_folder: Path) -> None:
    code = (
        "import sys\n"
        "from octavo.engine.build import find_checkpoint\n"
        "from octavo.engine.config.engine_config import EngineConfig\n"
        "import octavo.server.launch, octavo.server.cli, octavo.engine.service.fetching\n"
        f"find_checkpoint(EngineConfig.from_options({{'model': {str(model_folder)!r}}}))\n"
        "sys.exit('huggingface_hub' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
