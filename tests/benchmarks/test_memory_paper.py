"""The paper's memory tables: the parts they are made of, and what a very short stream must show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.engine.scheduling.beam_search import BeamSearch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paper() -> Any:
    """``benchmarks/memory_paper.py``, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("memory_paper", BENCHMARKS / "memory_paper.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reservations(paper: Any) -> Any:
    return importlib.import_module("paper.reservations")


@pytest.fixture(scope="module")
def found(paper: Any) -> Any:
    return paper.measure(paper.Sizes(80, 300, 6, 30, 40, 250), num_slots=4096)


def test_a_stream_has_the_papers_means_and_fits_the_model(paper: Any) -> None:
    for model in (paper.SHAREGPT, paper.ALPACA):
        stream = model.draw(500, 3)
        assert stream == model.draw(500, 3) != model.draw(500, 4)
        mean_prompt, mean_output = paper.means(stream)
        assert mean_prompt == pytest.approx(model.mean_prompt, rel=0.01)
        assert mean_output == pytest.approx(model.mean_output, rel=0.01)
        assert all(min(one) >= 1 and sum(one) <= 2048 for one in stream)


def test_buddies_never_overlap_and_join_again(reservations: Any) -> None:
    random, num_slots = Random(1), 1000
    buddies = reservations.BuddyAllocator(num_slots)
    taken: list[tuple[int, int]] = []
    for _ in range(3000):
        if taken and random.random() < 0.5:
            buddies.release(*taken.pop(random.randrange(len(taken))))
        elif (piece := buddies.allocate(random.randint(1, 200))) is not None:
            taken.append(piece)
        slots = [slot for start, size in taken for slot in range(start, start + size)]
        assert len(set(slots)) == len(slots)
        assert max(slots, default=0) < num_slots
    for piece in taken:
        buddies.release(*piece)
    assert buddies.allocate(512) == (0, 512)
    assert buddies.allocate(512) is None  # of 1000 slots, 512 + 256 + 128 + 64 + 32 + 8
    assert buddies.allocate(256) == (512, 256)


def test_reservations_use_what_arithmetic_says(paper: Any, reservations: Any) -> None:
    lengths = importlib.import_module("paper.lengths").Lengths
    stream = [lengths(100, 28)] * 50  # 128 slots in the end: 113.5 tokens on average
    oracle = reservations.simulate(stream, 1024, reservations.oracle, 0.0)
    assert oracle.num_running == 8
    assert oracle.token_share == pytest.approx(113.5 / 128)
    assert oracle.outside_share == pytest.approx(0)
    pow2 = reservations.simulate(stream, 1024, reservations.pow2, 0.0)  # 132, rounded up to 256
    assert pow2.num_running == 4
    assert pow2.never_share == pytest.approx(4 * 4 / 1024)
    assert pow2.outside_share == pytest.approx(4 * 124 / 1024)


@pytest.mark.parametrize("num_slots", [100_000, 640])  # the second preempts
def test_beams_continue_each_other_as_recorded(
    paper: Any, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = importlib.import_module("paper.replay")
    lengths = importlib.import_module("paper.lengths").Lengths
    searches = paper.beam_record.load()[4]
    built: list[BeamSearch] = []
    chosen: dict[int, list[tuple[int, ...]]] = {}
    build, advance = BeamSearch.__init__, BeamSearch.advance

    def noted_build(search: BeamSearch, *args: Any) -> None:
        build(search, *args)
        built.append(search)

    def noted_advance(search: BeamSearch, *args: Any) -> Any:
        following = advance(search, *args)
        chosen.setdefault(id(search), []).append(tuple(c.parent for c in following))
        return following

    monkeypatch.setattr(BeamSearch, "__init__", noted_build)
    monkeypatch.setattr(BeamSearch, "advance", noted_advance)
    stream = [lengths(20, 300), lengths(5, 1), *[lengths(33, 80)] * 8]
    replayer = replay.Replayer(stream, num_slots, n=4, searches=searches)
    result = replayer.run()
    assert bool(result.num_preemptions) == (num_slots == 640)
    for number, one in enumerate(stream):
        search = replayer.executor.search_of(number)
        parents = [search.parents(step) for step in range(one.num_output_tokens - 1)]
        assert chosen[id(built[number])] == [*parents, ()]


def test_sharing_is_what_the_parents_say(paper: Any) -> None:
    replay = importlib.import_module("paper.replay").replay
    lengths = importlib.import_module("paper.lengths").Lengths
    recorded = paper.beam_record.RecordedSearch
    stream = [lengths(64, 1000)]
    alike = replay(stream, 8192, n=2, searches=[recorded([(0, 0)])])
    assert 0.48 < alike.saved_share < 0.5  # all but the last block
    apart = replay(stream, 8192, n=2, searches=[recorded([(0, 0), (0, 1)])])
    samples = replay(stream, 8192, n=2)
    assert apart.saved_share == pytest.approx(samples.saved_share, abs=0.01)  # the prompt


def test_paging_wastes_what_half_a_block_is(found: Any) -> None:
    sharegpt, alpaca, alpaca_8, alpaca_4 = found["paged"]
    assert sharegpt["tokens"] > 96.3
    assert alpaca["tokens"] < alpaca_8["tokens"] < alpaca_4["tokens"]
    for row in found["paged"]:
        assert row["tokens"] == pytest.approx(row["expected"], abs=0.7)


def test_paging_beats_every_reservation(found: Any) -> None:
    for name in ("ShareGPT", "Alpaca"):
        contiguous = [row for row in found["reservations"] if row["data"] == name]
        largest, pow2, oracle = (row["batch"] for row in contiguous)
        ours = next(row for row in found["paged"] if row["data"] == name)
        assert largest == 2.0
        assert largest < pow2 < oracle < ours["batch"] / 2
        for row in contiguous:
            assert row["tokens"] < ours["tokens"] / 2
            parts = row["tokens"] + row["for later"] + row["never used"] + row["outside"]
            assert parts == pytest.approx(100, abs=0.3)


def test_a_higher_watermark_preempts_less(found: Any) -> None:
    default, cached, *higher = found["admission"]
    preempted = [row["preemptions a request"] for row in (default, *higher)]
    assert preempted == sorted(preempted, reverse=True)
    assert preempted[0] > preempted[-1]
    assert cached["computed again, %"] < default["computed again, %"]


def test_sharing_grows_with_the_width_and_is_most_for_beams(found: Any) -> None:
    saved = {(row["data"], row["kind"], row["width"]): row["saved"] for row in found["sharing"]}
    for name in ("ShareGPT", "Alpaca"):
        for kind in ("samples", "beams"):
            assert 0 < saved[name, kind, 2] < saved[name, kind, 4] < saved[name, kind, 6]
        for width in (2, 4, 6):
            assert saved[name, "samples", width] < saved[name, "beams", width]
            assert saved[name, "beams", width] < 100 * (width - 1) / width


def test_a_shared_prefix_is_computed_once(found: Any) -> None:
    for reserved, off, on in (found["prefix"][:3], found["prefix"][3:]):
        assert reserved["batch"] < off["batch"] < on["batch"]
        assert off["blocks saved"] == 0.0 < on["blocks saved"]
        assert off["prompt tokens computed a request"] > 3 * on["prompt tokens computed a request"]


def test_the_report_names_every_figure(paper: Any, found: Any) -> None:
    text = paper.report(found)
    for figure in ("96.3", "30.42", "132.44", "16.2-30.5", "44.3-66.3", "6.1-9.8", "37.6-55.2"):
        assert figure in text
