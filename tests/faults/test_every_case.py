"""Each known fault of these themes is held by a test that bears its id."""

from __future__ import annotations

import re
from pathlib import Path

CASES = {
    "a": "01 03 05 07 09 12 13 15",
    "b": "01 03 05 08 10 11",
    "c": "01 03 06 08 10 12 15 16 17",
    "d": "01 02 04 07 09 12 13 15 17",
    "e": "01 03 06 08 10 12 14",
    "f": "01 02 04 06 08 12",
    "j": "02 03 04 07 08 11 13",
}


def test_every_case_has_its_tests() -> None:
    names = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    found = set(re.findall(r"def test_([a-j]\d\d)_", names))
    assert found == {theme + number for theme, all in CASES.items() for number in all.split()}
