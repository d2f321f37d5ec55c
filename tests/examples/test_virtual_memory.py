"""``examples/virtual_memory.py``: its pictures of hand-made memory, and the facts that it prints of real memory."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from octavo.engine.api import KVBlock, KVSequence, KVSnapshot

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "virtual_memory.py"
PAGE = ROOT / "docs" / "virtual-memory.md"
HEADING = re.compile(r"^(\d)\. (.+)\n=+$", re.MULTILINE)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_virtual_memory", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _snapshot(
    tables: dict[int, tuple[str, tuple[int, ...]]], cached: tuple[int, ...] = ()
) -> KVSnapshot:
    """Six blocks of four slots, all filled; ``tables`` by ``seq_id``: a request's id and a block table."""
    seq_ids = {b: tuple(s for s, (_, table) in tables.items() if b in table) for b in range(6)}
    blocks = tuple(KVBlock(b, len(seq_ids[b]), 4, b in cached, seq_ids[b]) for b in range(6))
    sequences = tuple(
        KVSequence(request_id, seq_id, "running", 4 * len(table), table)
        for seq_id, (request_id, table) in tables.items()
    )
    return KVSnapshot(6, 4, blocks, sequences)


# --- helpers ------------------------------------------------------------------------------------------


def test_the_grid_names_owners_and_tells_two_kinds_of_free_blocks(example: ModuleType) -> None:
    snapshot = _snapshot({7: ("A", (5, 0)), 8: ("G", (2, 3)), 9: ("G", (2, 4))}, cached=(1, 2))
    first = next(iter(example.pool_grid(snapshot)))
    assert first.split("|")[1].split() == ["A1", "~", "xy", "x1", "y1", "A0"]


def test_the_grid_breaks_into_rows(example: ModuleType) -> None:
    blocks = tuple(KVBlock(b, 0, 0, False, ()) for b in range(20))
    rows = [line for line in example.pool_grid(KVSnapshot(20, 4, blocks, ())) if "|" in line]
    assert [row.split("|")[0].strip() for row in rows] == ["0", "16"]
    assert [row.count(".") for row in rows] == [16, 4]


def test_a_copy_is_an_entry_that_changed_and_growth_is_none(example: ModuleType) -> None:
    before = _snapshot({7: ("G", (0, 1)), 8: ("G", (0, 1))})
    after = _snapshot({7: ("G", (0, 3, 4)), 8: ("G", (0, 1)), 9: ("H", (5,))})
    assert example.copied_blocks(before, after) == [(7, 1, 1, 3)]


def test_the_sharing_table_has_each_blocks_number_of_owners(example: ModuleType) -> None:
    snapshot = _snapshot({1: ("F", (4, 2)), 2: ("F", (4, 3)), 3: ("F", (4,))})
    lines = [
        re.sub(r" +", " ", line).strip()
        for line in example.sharing_table(snapshot, snapshot.sequences)
    ]
    assert lines == [
        "logical 0 1",
        "beam x 4 (x3) 2 (x1)",
        "beam y 4 (x3) 3 (x1)",
        "beam z 4 (x3)",
    ]


def test_savings_compare_used_blocks_with_all_table_entries(example: ModuleType) -> None:
    snapshot = _snapshot({1: ("F", (4, 2)), 2: ("F", (4, 3))})
    saved = example.beam_savings(snapshot, snapshot.sequences)
    assert saved == "3 blocks are used; without sharing it would be 4: 25% saved."


def test_requests_fit_in_their_order_until_one_does_not(example: ModuleType) -> None:
    reservation = example.Reservation("any", [16, 16, 64, 8])
    assert [reservation.num_fitting(n) for n in (15, 16, 32, 95, 96, 104)] == [0, 1, 2, 2, 3, 4]


def test_numbers_and_bars(example: ModuleType) -> None:
    assert [example.next_power_of_two(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    assert example.waste(12, 16) == "25.0%"
    assert example.bar(23, 48) == "##----"
    assert example.quoted("a\nb") == '"a\\nb"'
    assert example.clipped("x" * 100) == "x" * 100
    assert len(example.clipped("x" * 101)) == 100


# --- the whole ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output() -> str:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    run = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def sections(output: str) -> dict[int, str]:
    """Text by the section's number."""
    _, *parts = HEADING.split(output)
    return {int(parts[i]): parts[i + 2] for i in range(0, len(parts), 3)}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _find(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern.replace(" ", r"\s+"), text)
    assert found is not None, f"{pattern!r} is not in:\n{text}"
    return found


@pytest.mark.model
@pytest.mark.slow
def test_five_sections_that_fit_the_terminal(output: str, sections: dict[int, str]) -> None:
    assert list(sections) == [1, 2, 3, 4, 5]
    assert [line for line in output.splitlines() if len(line) > 100] == []


@pytest.mark.model
@pytest.mark.slow
def test_one_sequence_is_scattered_and_its_position_is_translated(sections: dict[int, str]) -> None:
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+)/16 ", sections[1], re.MULTILINE)
    table = [int(physical) for _, physical, _ in rows]
    assert [int(logical) for logical, _, _ in rows] == list(range(len(rows)))
    assert table == _numbers(_find(r"joins the two: \[([\d, \n]+)\]", sections[1])[1])
    assert sum(b != a + 1 for a, b in pairwise(table)) >= 2
    for logical, physical in enumerate(table):
        assert _grid(sections[1])[physical] == f"C{logical}"
    slot = _find(r"slot (\d+) \* 16 \+ (\d+) = (\d+)", sections[1])
    assert _numbers(slot[0]) == [table[2], 16, 37 % 16, table[2] * 16 + 37 % 16]


def _grid(section: str) -> list[str]:
    rows = re.findall(r"^ +\d+ \|(.*)$", section, re.MULTILINE)
    return [cell for row in rows for cell in row.split()]


@pytest.mark.model
@pytest.mark.slow
def test_paging_wastes_little_where_reservation_wastes_most(sections: dict[int, str]) -> None:
    row = r"^  {} +(\d+) +(\d+) +([\d.]+)% +(\d) of 8$"
    found = {}
    for name in ("paged", "prompt \\+ next power of two", "max_model_len"):
        match = re.search(row.format(name), sections[2], re.MULTILINE)
        assert match is not None, name
        found[name] = [float(value) for value in match.groups()]
    paged, powers, longest = found.values()
    assert paged[1] == powers[1] == longest[1]
    assert 0 <= paged[0] - paged[1] < 8 * 16
    assert paged[2] < 20 < powers[2] < longest[2]
    assert (paged[3], longest[3]) == (8, 2)


@pytest.mark.model
@pytest.mark.slow
def test_beams_share_their_prefix_and_own_their_ends(sections: dict[int, str]) -> None:
    rows = re.findall(r"^  beam ([xyz]) +(.*\(x\d\))$", sections[3], re.MULTILINE)
    assert [name for name, _ in rows] == ["x", "y", "z"]
    tables = [re.findall(r"(\d+) \(x(\d)\)", cells) for _, cells in rows]
    grid = _grid(sections[3])
    for table in tables:
        assert table[0] == tables[0][0]
        assert (table[0][1], grid[int(table[0][0])]) == ("3", "xyz")
        assert all(len(grid[int(block)].rstrip("0123456789")) == int(refs) for block, refs in table)
    used = {block for table in tables for block, _ in table}
    saved = _find(r"(\d+) blocks are used; without sharing it would be (\d+)", sections[3])
    assert _numbers(saved[0]) == [len(used), sum(map(len, tables))]
    assert len(used) < sum(map(len, tables))


@pytest.mark.model
@pytest.mark.slow
def test_one_write_to_a_shared_block_copies_it_and_the_other_does_not(
    sections: dict[int, str],
) -> None:
    tables = [
        _numbers(found)
        for found in re.findall(r"[xy]: \d+ tokens, block table \[(.*)\]", sections[4])
    ]
    before_x, before_y, after_x, after_y = tables
    copy = _find(r"after the copy: block (\d+) -> block (\d+)", sections[4])
    source, target = int(copy[1]), int(copy[2])
    assert _find(r"The step made (\d+) copy", sections[4])[1] == "1"
    assert before_x == before_y
    assert before_x[-1] == source
    assert sorted([after_x[-1], after_y[-1]]) == sorted([source, target])
    assert f"in place, in block {source}" in sections[4]
    counts = re.findall(rf"block {source}: ref_count (\d)", sections[4])
    assert counts == ["2", "1"]


@pytest.mark.model
@pytest.mark.slow
def test_freed_blocks_are_hit_and_later_evicted(sections: dict[int, str]) -> None:
    text = sections[5]
    old = _numbers(_find(r"its blocks \[([\d, \n]+)\]", text)[1])
    hit, again = re.findall(r"(\d+)\s+of\s+\d+\s+prompt\s+tokens\s+are\s+hits", text)
    mine = re.findall(r"begins\s+with\s+A's\s+blocks\s+\[([\d,\s]+)\]", text)
    evicted = _find(r"So (\d+) cached blocks are evicted: \[([\d, \n]+)\]", text)
    grid_after_finish = _grid(text)[:48]
    assert all(grid_after_finish[block] == "~" for block in old)
    assert int(hit) >= 16 * len(_numbers(mine[0])) > 0
    assert _numbers(mine[0]) == old[: len(_numbers(mine[0]))]
    assert len(_numbers(evicted[2])) == int(evicted[1]) > 0
    assert 0 < int(again) < int(hit)
    assert not set(_numbers(mine[1])) & set(_numbers(evicted[2]))


@pytest.mark.model
@pytest.mark.slow
def test_the_page_shows_what_the_example_prints(output: str) -> None:
    """Lines with the model's text may differ between machines, and so may what beams share."""
    shown = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [
        line
        for block in shown
        if "beam x" not in block
        for line in block.splitlines()
        if line.strip() and '"' not in line
    ]
    assert len(lines) > 30
    assert [line for line in lines if line not in output.splitlines()] == []
