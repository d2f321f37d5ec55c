"""What is a repository's name, and what is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.checkpoint.hub.names import HubModel, hub_model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("Qwen/Qwen2.5-0.5B", HubModel("Qwen/Qwen2.5-0.5B")),
        ("a/b_c.d-e", HubModel("a/b_c.d-e")),
        ("org/name:Q4_K_M", HubModel("org/name", "Q4_K_M")),
        ("org/name:sub/model-Q8_0.gguf", HubModel("org/name", "sub/model-Q8_0.gguf")),
    ],
)
def test_names_of_the_hub(model: str, expected: HubModel) -> None:
    assert hub_model(model) == expected


@pytest.mark.parametrize(
    "model",
    [
        None,
        *("", "name", "name.gguf", "folder/model.gguf", "/org/name", "./org/name", "../org/name"),
        *("~/org", "org/name/", "org/", "/org", "a/b/c", "org/na me", "org/name:", "org/name:a:b"),
        *("org/--name", "org/a--b", "org/a..b", "org/name:../x", "-org/name", "org/.name"),
        *("https://org/name", "org/é", "org/name\n", "o/" + "n" * 95),
    ],
)
def test_everything_else_is_a_path(model: str | None) -> None:
    assert hub_model(model) is None


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name") is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_model("org/name") is None
