"""Each known fault of these themes is held by a test that bears its id, by tests elsewhere, or has no place yet."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = {
    "a": "01 03 05 07 09 12 13 15",
    "b": "01 03 05 08 10 11",
    "c": "01 03 06 08 10 12 15 16 17",
    "d": "01 02 04 07 09 12 13 15 17",
    "e": "01 03 06 08 10 12 14",
    "f": "01 02 04 06 08 12",
    "h": "01 04 06 07 09 11 12 15",
    "i": "01 04 06 07 10 12 13 15 16",
    "j": "02 03 04 07 08 11 13",
}
ELSEWHERE = {
    "h01": (
        "road/test_engine_death.py::test_no_client_sees_anything_of_kills_at_random_moments",
        "service/test_process_life.py::test_an_engine_that_died_once_too_often_is_told_and_ends_the_server",
    ),
    "h15": (
        "server/test_auth.py::test_open_routes_are_exactly_the_allowlist",
        "server/test_auth.py::test_no_spelling_of_a_path_opens_it",
    ),
    "i04": (
        "server/test_auth.py::test_every_key_is_compared",
        "server/test_auth.py::test_keys",
    ),
}
NO_PLACE = {
    "i07": "no tool calls are parsed from what a model says",
    "i15": "no grammars are compiled",
}


def test_every_case_has_its_tests() -> None:
    names = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    found = set(re.findall(r"def test_([a-j]\d\d)_", names))
    wanted = {theme + number for theme, all in CASES.items() for number in all.split()}
    assert found | set(ELSEWHERE) | set(NO_PLACE) == wanted
    assert not found & (set(ELSEWHERE) | set(NO_PLACE))


def test_tests_elsewhere_exist() -> None:
    for name in (name for names in ELSEWHERE.values() for name in names):
        path, _, function = name.partition("::")
        assert re.search(rf"^(?:async )?def {function}\(", (TESTS / path).read_text(), re.MULTILINE)
