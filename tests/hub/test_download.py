"""Downloads from a fake Hub, each by the process that octavo starts for it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import save_file

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.hub.fetch import Fetch, fetch
from octavo.engine.checkpoint.hub.names import HubModel
from octavo.engine.errors import CheckpointError

if TYPE_CHECKING:
    from tests.hub.conftest import FakeHub, Repo

pytestmark = pytest.mark.slow
REPO = "tiny-lab/Tiny-Llama.1"
TOKEN = "hf_secretsecretsecret"


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(model: HubModel) -> str:
    with pytest.raises(CheckpointError) as refused:
        fetch(model)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_a_model_comes_whole_and_nothing_else_does(
    hub: FakeHub, repo: Repo, model_folder: Path, tmp_path: Path
) -> None:
    shares: list[float] = []
    folder = fetch(HubModel(REPO), shares.append)
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert read_folder(folder) == read_folder(model_folder)
    assert open_checkpoint(folder).default_sampling == {"temperature": 0.5, "top_k": 7}
    assert shares == sorted(shares)
    asked = " ".join(request.path for request in hub.requests)
    for name in (".bin", ".pth", ".onnx", ".py", "README", "params"):
        assert name not in asked
    before = len(hub.requests)
    assert fetch(HubModel(REPO)) == folder  # idempotent
    assert [r.path for r in hub.requests[before:]] == [f"/api/models/{REPO}/revision/main"]


def test_shards_are_those_of_the_index(
    hub: FakeHub, repo: Repo, weights: dict[str, Any], tmp_path: Path
) -> None:
    names = sorted(weights)
    parts = {"a-of-2.safetensors": names[:5], "b-of-2.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, str(tmp_path / file), {"format": "pt"})
        repo.files[file] = (tmp_path / file).read_bytes()
    weight_map = {name: file for file, held in parts.items() for name in held}
    repo.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    repo.files["consolidated.safetensors"] = b"S" * 20_000
    folder = fetch(HubModel(REPO))
    assert set(open_checkpoint(folder).tensor_files) == set(names)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == sorted(parts)
    del repo.files["b-of-2.safetensors"]
    hub.repos["tiny-lab/lacks"] = repo
    assert "tiny-lab/lacks lacks b-of-2.safetensors" in refusal(HubModel("tiny-lab/lacks"))


def test_an_index_that_points_elsewhere_is_refused(repo: Repo) -> None:
    weight_map = {"model.norm.weight": "../../evil.safetensors"}
    repo.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    assert "lacks ../../evil.safetensors" in refusal(HubModel(REPO))


def test_one_of_several_gguf_files(
    hub: FakeHub, put_gguf: Callable[..., Repo], caplog: pytest.LogCaptureFixture
) -> None:
    put_gguf("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "more/tiny-F32.gguf")
    with caplog.at_level(logging.INFO):
        path = fetch(HubModel(REPO))
    assert path.name == "tiny-Q4_K_M.gguf"
    assert "tiny-Q4_K_M.gguf, one of 3 GGUF files" in caplog.text
    assert fetch(HubModel(REPO, "f32")).parts[-2:] == ("more", "tiny-F32.gguf")
    assert len(hub.transfers()) == 2
    assert open_checkpoint(path).spec.num_layers == 2
    assert "it has more/tiny-F32.gguf" in refusal(HubModel(REPO, "Q5_0"))


def test_a_revision(
    repo: Repo, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = read_folder(model_folder) | {"generation_config.json": b'{"top_k": 3}'}
    repo.revisions["v2"] = other
    newer = fetch(HubModel(REPO, revision="v2"))
    older = fetch(HubModel(REPO))
    assert open_checkpoint(newer).default_sampling == {"top_k": 3}
    assert open_checkpoint(older).default_sampling == {"temperature": 0.5, "top_k": 7}
    commit = newer.name
    assert fetch(HubModel(REPO, revision=commit)) == newer
    main = fetch(HubModel(REPO, revision=older.name, cache_dir=str(tmp_path / "by-commit")))
    assert fetch(HubModel(REPO, cache_dir=str(tmp_path / "by-commit"))) == main
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the branch is found there, too
    assert fetch(HubModel(REPO, cache_dir=str(tmp_path / "by-commit"))) == main
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert f"{REPO} has no revision v3; --revision takes" in refusal(HubModel(REPO, revision="v3"))


def test_another_folder_for_downloads(repo: Repo, tmp_path: Path) -> None:
    folder = fetch(HubModel(REPO, cache_dir=str(tmp_path / "elsewhere")))
    assert folder.is_relative_to(tmp_path / "elsewhere")
    assert not (tmp_path / "home" / "hub" / "models--tiny-lab--Tiny-Llama.1").exists()


def test_the_token_goes_to_the_hub_alone_and_is_never_told(
    hub: FakeHub,
    repo: Repo,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    repo.token = TOKEN
    assert "no repository" in refusal(HubModel(REPO))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    text = refusal(HubModel(REPO))
    assert "the one that is set may not" in text
    assert "hf_wrong" not in text
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with caplog.at_level(logging.DEBUG):
        fetch(HubModel(REPO))
    assert hub.transfers()
    for request in hub.requests:
        is_elsewhere = request.path.startswith("/elsewhere/")
        if is_elsewhere:
            assert request.authorization is None
    assert any(r.authorization == f"Bearer {TOKEN}" for r in hub.requests)
    told = capfd.readouterr()
    assert TOKEN not in told.out + told.err + caplog.text


def test_a_transfer_that_breaks_off_goes_on_where_it_was(
    hub: FakeHub, put_gguf: Callable[..., Repo], capfd: pytest.CaptureFixture[str]
) -> None:
    """In pieces of 10 MiB, which the library holds in memory before it writes them."""
    piece = 10 << 20
    repo = put_gguf("tiny.gguf")
    repo.files["tiny.gguf"] += bytes(2 * piece)
    hub.break_offs = [piece + 5, piece + 5]
    shares: list[float] = []
    path = fetch(HubModel(REPO), shares.append)
    assert path.read_bytes() == repo.files["tiny.gguf"]
    ranges = [request.range for request in hub.transfers()]
    assert ranges == [None, f"bytes={piece}-", f"bytes={2 * piece}-"]
    assert shares
    assert shares == sorted(shares)
    assert "elsewhere" not in capfd.readouterr().err  # such addresses are signed


def test_a_transfer_that_never_ends_well_is_given_up(
    hub: FakeHub, put_gguf: Callable[..., Repo]
) -> None:
    put_gguf("tiny.gguf")
    hub.resets = 100
    text = refusal(HubModel(REPO))
    assert "cannot be reached, or breaks off (ReadError)" in text
    assert len(hub.transfers()) > 1


def test_after_a_download_was_ended_whole_files_are_there_and_no_part_is(
    hub: FakeHub, repo: Repo, model_folder: Path, tmp_path: Path
) -> None:
    hub.held_after = 0
    one = Fetch(HubModel(REPO))
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            one.wait()
        except CheckpointError as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    while not (hub.transfers() and any((tmp_path / "home").rglob("*.incomplete"))):
        time.sleep(0.02)
    one.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert "start again to go on" in str(ended[0])
    assert not list((tmp_path / "home").rglob("*.incomplete"))
    hub.held_after, before = None, len(hub.requests)
    hub.released.set()
    assert read_folder(fetch(HubModel(REPO))) == read_folder(model_folder)
    again = [request.path.split("/")[-1] for request in hub.requests[before:]]
    assert "tokenizer.json" not in again
    assert "model.safetensors" in again


def test_without_a_network_the_cache_serves_and_says_so(
    hub: FakeHub, repo: Repo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "is gated" not in refusal(HubModel("tiny-lab/absent"))
    folder = fetch(HubModel(REPO))
    before = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with caplog.at_level(logging.INFO):
        assert fetch(HubModel(REPO)) == folder
    assert "comes from the cache" in caplog.text
    assert len(hub.requests) == before
    text = refusal(HubModel("tiny-lab/other"))
    assert "tiny-lab/other is not in the cache" in text
    assert "HF_HUB_OFFLINE is set" in text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://me:hunter2@127.0.0.1:9")  # where nobody listens
    assert fetch(HubModel(REPO)) == folder
    text = refusal(HubModel("tiny-lab/other"))
    assert "http://127.0.0.1:9 cannot be reached" in text
    assert "check the network" in text
    assert "hunter2" not in text


def test_a_cache_that_is_not_whole_does_not_serve(
    hub: FakeHub, put_gguf: Callable[..., Repo], repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(HubModel(REPO))
    (folder / "chat_template.jinja").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is not in the cache, at least not whole" in refusal(HubModel(REPO))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert fetch(HubModel(REPO)) == folder
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no weights" in refusal(HubModel(REPO))


def test_another_gguf_file_than_the_cached_one_is_not_taken_for_it(
    put_gguf: Callable[..., Repo], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gguf("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")
    path = fetch(HubModel(REPO, "Q8_0"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(HubModel(REPO, "Q8_0")) == path
    text = refusal(HubModel(REPO, "Q4_K_M"))
    assert "no GGUF file for Q4_K_M; it has tiny-Q8_0.gguf" in text
    assert "HF_HUB_OFFLINE" in text


@pytest.mark.parametrize("status", [500, 429])
def test_a_hub_in_trouble(hub: FakeHub, repo: Repo, status: int) -> None:
    hub.status = status
    assert f"status {status}" in refusal(HubModel(REPO))
    assert len(hub.requests) > 1  # tried again
    hub.status = None
    folder = fetch(HubModel(REPO))
    hub.status = status
    assert fetch(HubModel(REPO)) == folder


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_the_hub_refuses(
    hub: FakeHub, repo: Repo, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.status, hub.status_message = status, "Invalid credentials in Authorization header"
    text = refusal(HubModel(REPO))
    assert f"refuses {REPO} with status {status}: give a token that may read it in HF_TOKEN" in text
    assert TOKEN not in text
    assert len(hub.requests) == 1  # asking again changes nothing


def test_what_answers_in_the_hubs_place(hub: FakeHub, repo: Repo) -> None:
    hub.page = b"<html>Log in to this network</html>"
    text = refusal(HubModel(REPO))
    assert f"{hub.url} cannot be reached" in text
    assert "html" not in text


def test_gated(hub: FakeHub, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.is_gated = True
    text = refusal(HubModel(REPO))
    assert f"accept its terms at {hub.url}/{REPO}" in text
    assert "HF_TOKEN" in text
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "the one that is set may not" in refusal(HubModel(REPO))


def test_what_is_not_served_is_refused_before_its_weights_come(hub: FakeHub, repo: Repo) -> None:
    config = json.loads(repo.files["config.json"]) | {"architectures": ["BertModel"]}
    repo.files["config.json"] = json.dumps(config).encode()
    assert "architecture BertModel is not supported" in refusal(HubModel(REPO))
    assert not hub.transfers()
    del repo.files["model.safetensors"]
    assert "consolidated.00.pth only, which can run code" in refusal(HubModel(REPO))


def test_a_disk_without_room(hub: FakeHub, repo: Repo) -> None:
    repo.sizes["model.safetensors"] = 10**16
    text = refusal(HubModel(REPO))
    assert f"{REPO} needs 10000.0 TB more on the disk" in text
    assert "--download-dir" in text
    assert not hub.transfers()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(repo: Repo, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    text = refusal(HubModel(REPO, cache_dir=str(tmp_path / "closed")))
    assert "cannot be kept: Permission denied" in text


def test_a_file_in_the_cache_s_place(repo: Repo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refusal(HubModel(REPO, cache_dir=str(tmp_path / "file")))
    assert f"{REPO} cannot be kept: Not a directory; see --download-dir" in text
