"""``octavo models``: what is there, what it needs, what does not work and why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.numpy import save_file

from octavo.engine.api import LocalModel
from octavo.engine.build import build_core
from octavo.engine.checkpoint.hub.fetch import fetch
from octavo.engine.checkpoint.hub.names import HubModel
from octavo.engine.checkpoint.inventory import Machine, list_models
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.config.machine import cpu_has_bfloat16, free_gpu_bytes
from octavo.server.cli import main
from octavo.server.models_table import render

if TYPE_CHECKING:
    from tests.hub.conftest import FakeHub, Repo

REPO = "tiny-lab/Tiny-Llama.1"
CPU = Machine("cpu", 10**9)
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 4, 8


def octavo_models(*arguments: str) -> str:
    """What the command prints, in a process of its own, since the library reads the environment once."""
    command = [sys.executable, "-P", "-m", "octavo", "models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def only(models: list[LocalModel]) -> LocalModel:
    (model,) = models
    return model


@pytest.fixture
def no_cache(tmp_path: Path) -> str:
    return str(tmp_path / "no-cache")


def test_a_folder_with_one_model(model_folder: Path, no_cache: str, weights: Any) -> None:
    model = only(list_models(CPU, [model_folder], cache_dir=no_cache))
    assert (model.name, model.path) == (str(model_folder), str(model_folder))
    assert model.problem is None
    assert (model.architecture, model.dtype, model.window) == ("LlamaForCausalLM", "float32", 256)
    assert model.size_bytes == sum(path.stat().st_size for path in model_folder.iterdir())
    embedding = weights["model.embed_tokens.weight"].size
    assert model.weight_bytes == 4 * (sum(w.size for w in weights.values()) + embedding)
    assert model.kv_bytes_per_1k_tokens == 1000 * 2 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * 4
    assert (model.fits, model.max_tokens) == (True, 256)


def test_a_model_that_transformers_would_compute(
    model_folder: Path, no_cache: str, tmp_path: Path
) -> None:
    """Which tensors its class needs is not known here."""
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"architectures": ["CohereForCausalLM"]})
    )
    model = only(list_models(CPU, [str(other)], cache_dir=no_cache))
    assert (model.problem, model.architecture, model.fits) == (None, "CohereForCausalLM", True)


def test_the_kv_memory_is_what_the_engine_takes(model_folder: Path, no_cache: str) -> None:
    model = only(list_models(CPU, [model_folder], cache_dir=no_cache))
    options = {"model": str(model_folder), "attention_backend": "torch"}
    assert model.kv_bytes_per_1k_tokens is not None
    _, info = build_core(EngineConfig.from_options(options), 0)
    assert info.kv_cache_bytes * 1000 == model.kv_bytes_per_1k_tokens * info.num_blocks * 16


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "expected"),
    [
        ("float32", True, "float32"),
        ("float16", True, "bfloat16"),
        ("bfloat16", True, "bfloat16"),
        ("bfloat16", False, "float32"),
    ],
)
def test_the_type_that_would_be_chosen(
    model_folder: Path,
    tmp_path: Path,
    no_cache: str,
    dtype: str,
    has_bfloat16: bool,
    expected: str,
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    machine = Machine("cpu", 10**9, has_bfloat16=has_bfloat16)
    assert only(list_models(machine, [folder], cache_dir=no_cache)).dtype == expected
    on_gpu = only(list_models(Machine("cuda", 10**9), [folder], cache_dir=no_cache))
    assert on_gpu.dtype == dtype


def test_what_does_not_fit(model_folder: Path, no_cache: str) -> None:
    roomy = only(list_models(CPU, [model_folder], cache_dir=no_cache))
    assert roomy.weight_bytes is not None
    assert roomy.kv_bytes_per_1k_tokens is not None
    none = Machine("cpu", roomy.weight_bytes - 1)
    assert only(list_models(none, [model_folder], cache_dir=no_cache)).fits is False
    half = Machine("cpu", roomy.weight_bytes + roomy.kv_bytes_per_1k_tokens // 8)
    some = only(list_models(half, [model_folder], cache_dir=no_cache))
    assert (some.fits, some.max_tokens) == (False, 125)
    assert "no: the memory that is free" in render([some], as_json=False)


def test_a_folder_of_models_and_what_is_none(
    model_folder: Path, gguf_file: bytes, tmp_path: Path, no_cache: str
) -> None:
    folder = tmp_path / "all"
    shutil.copytree(model_folder, folder / "a")
    (folder / "b").mkdir()
    (folder / "b" / "tiny-F32.gguf").write_bytes(gguf_file)
    (folder / "b" / "broken.gguf").write_bytes(gguf_file[:1000])
    (folder / "c").mkdir()
    (folder / "c" / "config.json").write_text('{"architectures": ["BertModel"]}')
    (folder / "d").mkdir()
    models = {Path(m.name).name: m for m in list_models(CPU, [folder], cache_dir=no_cache)}
    assert sorted(models) == ["a", "broken.gguf", "c", "tiny-F32.gguf"]
    assert models["a"].weight_bytes == models["tiny-F32.gguf"].weight_bytes
    assert "broken.gguf is damaged" in str(models["broken.gguf"].problem)
    assert "BertModel is not supported" in str(models["c"].problem)
    absent = only(list_models(CPU, [tmp_path / "absent"], cache_dir=no_cache))
    assert "There is no model at" in str(absent.problem)


@pytest.mark.slow
def test_what_the_cache_holds(hub: FakeHub, repo: Repo, put_gguf: Callable[..., Repo]) -> None:
    hub.repos["tiny-lab/folder"] = repo
    repo.revisions["v2"] = repo.files
    fetch(HubModel("tiny-lab/folder", revision="v2"))
    put_gguf("tiny-Q8_0.gguf", "more/tiny-F32.gguf")
    path = fetch(HubModel(REPO, "F32"))
    told = {model["name"]: model for model in json.loads(octavo_models("--json"))}
    assert told["tiny-lab/folder"]["revision"] == "v2"
    assert told["tiny-lab/folder"]["problem"] is None
    gguf = told[f"{REPO}:more/tiny-F32.gguf"]
    assert (gguf["path"], gguf["revision"]) == (str(path), "main")
    assert gguf["size_bytes"] == path.stat().st_size
    assert fetch(HubModel(REPO, "more/tiny-F32.gguf")) == path  # the name is as serve takes it
    assert f"{REPO}:tiny-Q8_0.gguf" not in told
    table = octavo_models()
    assert "tiny-lab/folder (v2)" in table
    assert "yes, with its window of 256 tokens" in table


@pytest.mark.model
def test_quantised_matrices_stay_as_they_are_where_kernels_can(no_cache: str) -> None:
    from octavo.engine.checkpoint.checkpoint import find_embedded_model

    path = find_embedded_model()
    assert path is not None
    kept, widened = (
        only(list_models(Machine("cpu", 10**9, keeps_blocks=keeps), [path], cache_dir=no_cache))
        for keeps in (True, False)
    )
    assert kept.quantization == "Q4_1"
    assert kept.weight_bytes is not None
    assert widened.weight_bytes is not None
    assert kept.size_bytes < kept.weight_bytes < 2 * kept.size_bytes
    assert widened.weight_bytes > 2 * 134_000_000


def test_wrecks_are_listed_with_what_is_wrong(
    model_folder: Path, tmp_path: Path, no_cache: str, weights: Any
) -> None:
    """Also what only the headers of the weights tell: no folder is said to fit that serve would refuse."""
    norm = "model.norm.weight"
    wrecks = {
        "lacks the tensor model.norm.weight": {n: w for n, w in weights.items() if n != norm},
        "holds the tensor extra.weight, which": weights | {"extra.weight": weights[norm]},
        "model.norm.weight has shape": weights | {norm: weights[norm][:3]},
        "model.norm.weight has type I32": weights | {norm: weights[norm].astype("int32")},
    }
    for index, tensors in enumerate(wrecks.values()):
        shutil.copytree(model_folder, tmp_path / "wrecks" / str(index))
        save_file(tensors, tmp_path / "wrecks" / str(index) / "model.safetensors")
    told = list_models(CPU, [tmp_path / "wrecks", "a" * 300], cache_dir=no_cache)
    problems = [model.problem or "" for model in told]
    assert len(problems) == len(wrecks) + 1
    for problem, expected in zip(problems, (*wrecks, "There is no model at aaa"), strict=True):
        assert expected in problem
    assert render(told, as_json=False).count("no: ") == len(problems)


def test_names_stay_on_their_line() -> None:
    model = LocalModel("a\nb.gguf", "a\nb.gguf", None, 4, 10**9, problem="a\nb.gguf is damaged.")
    _, row, _ = render([model], as_json=False).splitlines()
    assert row.startswith("a?b.gguf ")
    assert row.endswith(r"no: a\nb.gguf is damaged.")


def test_nothing_at_all_says_what_to_do() -> None:
    assert "octavo serve ORG/NAME" in render([], as_json=False)
    assert render([], as_json=True) == "[]\n"


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err


def test_the_processors_type_by_pytorchs_rule(tmp_path: Path) -> None:
    assert cpu_has_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    info = tmp_path / "cpuinfo"
    for line, expected in (
        ("flags\t: fpu avx2 avx512bw avx512vl avx512dq", True),
        ("flags\t: fpu avx2 avx512bw avx512vl", False),
        ("flags\t: fpu avx2 avx_ne_convert avx_vnni_int8", True),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
    ):
        info.write_text(f"processor\t: 0\n{line}\n")
        assert cpu_has_bfloat16(info) == expected


def test_the_gpu_by_its_drivers_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert free_gpu_bytes() is None
    for text, expected in (("81000\n40000", 81000 << 20), ("", None), ("[N/A]", None)):
        tool.write_text(f"#!/bin/sh\necho '{text}'\n")
        tool.chmod(0o755)
        assert free_gpu_bytes() == expected
