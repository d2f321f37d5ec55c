"""Every option stands in ``--help``, and every preset is one."""

from __future__ import annotations

import re
from dataclasses import Field
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.config.options import flag_of
from octavo.engine.config.sections import all_options, default_text
from octavo.engine.errors import ConfigError
from octavo.server.cli import main, resolve

OPTIONS = [option_field for _, option_field in all_options()]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture
def help_entries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """What ``octavo serve --help`` prints for each flag, on one line."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    entries = re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]
    return {re.split(r"[ ,]", entry)[0]: " ".join(entry.split()) for entry in entries}


def test_help_says_unit_and_default_of_every_flag(help_entries: dict[str, str]) -> None:
    for option_field in OPTIONS:
        entry = help_entries[flag_of(option_field.name)]
        assert f"Default: {default_text(option_field)}" in entry
        assert option_field.metadata["help"] in entry
        assert (option_field.metadata["unit"] or "") in entry


def test_no_option_is_declared_twice() -> None:
    names = [option_field.name for option_field in OPTIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("option_field", OPTIONS, ids=lambda f: f.name)
def test_an_option_that_may_be_none_says_what_none_becomes(option_field: Field[Any]) -> None:
    if option_field.default is None:
        assert option_field.metadata["default_text"]


def test_there_are_presets() -> None:
    assert PRESETS


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_every_preset_loads_by_path_and_by_name(path: Path) -> None:
    by_path = resolve(["--config", str(path)])
    assert by_path == resolve(["--config", path.stem])
    assert by_path != resolve([]), "the preset changes nothing"


def test_a_preset_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("max-num-sequences: 4\n")
    with pytest.raises(ConfigError, match="--max-num-sequences is not an option"):
        resolve(["--config", str(path)])
