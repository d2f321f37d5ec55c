"""Which of a repository's files make its model, by their names alone."""

from __future__ import annotations

import pytest

from octavo.engine.checkpoint.hub.files import choose, is_small
from octavo.engine.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def chosen(*names: str, choice: str | None = None) -> tuple[tuple[str, ...], str | None]:
    found = choose(names, "org/name", choice)
    return found.weights, found.gguf


def refusal(*names: str, choice: str | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        choose(names, "org/name", choice)
    return str(refused.value)


def test_safetensors_come_first_and_an_index_before_one_file() -> None:
    assert chosen("model.safetensors", "a-Q8_0.gguf") == (("model.safetensors",), None)
    assert chosen("model.safetensors", INDEX) == ((INDEX,), None)
    assert chosen("model.safetensors", "a-Q8_0.gguf", choice="Q8_0") == (
        ("a-Q8_0.gguf",),
        "a-Q8_0.gguf",
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("Q8_0", "x-Q8_0.gguf"),
        ("q8_0", "x-Q8_0.gguf"),
        ("x-Q4_K_M.gguf", "x-Q4_K_M.gguf"),
        ("x-Q4_K_M", "x-Q4_K_M.gguf"),
        ("Q4_K", "x-Q4_K.gguf"),  # and not Q4_K_M
        ("IQ4_NL", "x.iq4_nl.gguf"),
        ("UD-Q4_K_XL", "x-UD-Q4_K_XL.gguf"),
        ("F16", "x-fp16.gguf"),
        ("BF16", "sub/x-BF16.gguf"),
        ("sub/x-BF16.gguf", "sub/x-BF16.gguf"),
        ("x-BF16.gguf", "sub/x-BF16.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_quantisation_or_name(choice: str, expected: str) -> None:
    names = (
        *("x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-Q4_K.gguf", "x.iq4_nl.gguf", "x-UD-Q4_K_XL.gguf"),
        *("x-fp16.gguf", "sub/x-BF16.gguf", "mmproj-x-Q8_0.gguf", "x.imatrix.gguf", "README.md"),
    )
    assert chosen(*names, choice=choice) == ((expected,), expected)


def test_a_split_file_is_all_of_its_parts() -> None:
    parts = tuple(f"q/x-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3))
    assert chosen(*reversed(parts), "x-Q4_0.gguf", choice="Q8_0") == (parts, parts[0])
    assert "has 2 of the 3 parts of q/x-Q8_0.gguf" in refusal(*parts[1:], choice="Q8_0")


def test_the_usual_quantisation_where_none_is_chosen() -> None:
    assert choose(["x-Q2_K.gguf"], "org/name").note is None
    found = choose(["x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-F16.gguf"], "org/name")
    assert found.gguf == "x-Q4_K_M.gguf"
    assert found.note == "org/name: x-Q4_K_M.gguf, one of 3 GGUF files, since none was chosen"
    assert choose(["x-F16.gguf", "x-Q8_0.gguf"], "org/name").gguf == "x-Q8_0.gguf"


def test_several_that_nothing_tells_apart_are_listed() -> None:
    text = refusal("a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf")
    assert "several GGUF files: a-Q4_K_M.gguf, b-Q4_K_M.gguf, b-Q8_0.gguf; choose one" in text
    text = refusal("a-Q4_K_M.gguf", "b-Q4_K_M.gguf", choice="Q4_K_M")
    assert "several GGUF files for Q4_K_M: a-Q4_K_M.gguf, b-Q4_K_M.gguf" in text
    assert "org/name:a-Q4_K_M.gguf" in text
    assert "several GGUF files: a.gguf, b.gguf" in refusal("a.gguf", "b.gguf")
    assert "and 3 more" in refusal(*(f"{i:02}.gguf" for i in range(15)))


def test_a_choice_that_is_not_there_lists_what_is() -> None:
    assert "no GGUF file for Q5_0; it has x-Q8_0.gguf" in refusal("x-Q8_0.gguf", choice="Q5_0")
    assert "none to choose by :Q5_0" in refusal("model.safetensors", choice="Q5_0")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "a/model.ckpt"])
def test_weights_that_can_run_code_are_refused_by_name(name: str) -> None:
    assert f"as {name} only, which can run code when read" in refusal("config.json", name)


def test_what_else_is_no_model() -> None:
    assert "adapter" in refusal("adapter_config.json", "adapter_model.safetensors")
    assert "no weights that octavo reads" in refusal("README.md", "tf_model.h5")
    assert "no weights" in refusal("consolidated.safetensors", "mmproj-x.gguf", "x.imatrix.gguf")


def test_small_files_are_of_few_kinds_and_at_the_top() -> None:
    names = ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"]
    names += ["tokenizer.model", "additional_chat_templates/tool_use.jinja"]
    assert all(map(is_small, names))
    others = ["README.md", "original/params.json", "evil.py", "x.bin", "x.safetensors", "a.model"]
    assert not any(map(is_small, others))
