"""What is read beside the weights: config spellings, end ids, templates, sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from octavo.engine.checkpoint.hf_config import read_spec
from octavo.engine.errors import CheckpointError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def folder(make_tiny: Callable[..., Any], save: Callable[..., Path]) -> Path:
    path = save(make_tiny())
    edit(path, "config.json", eos_token_id=None)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


def edit(folder: Path, name: str, **changes: Any) -> Checkpoint | None:
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | changes))
    return None


def test_absent_keys_take_the_defaults_of_the_config_class() -> None:
    spec = read_spec(LLAMA, "config.json")
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (4, 16, 1e-6)
    assert (spec.rope.theta, spec.rope.rotary_dim, spec.rope.scaling) == (10000.0, 16, None)
    assert (spec.max_position_embeddings, spec.sliding_window) == (2048, None)
    assert (spec.tie_word_embeddings, spec.dtype) == (False, "float32")


def test_absent_keys_of_mistral() -> None:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}
    spec = read_spec(config, "config.json")
    assert (spec.sliding_window, spec.num_kv_heads, spec.max_position_embeddings) == (
        4096,
        8,
        131072,
    )
    assert read_spec(config | {"sliding_window": None}, "config.json").sliding_window is None


@pytest.mark.parametrize(
    "spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}]
)
def test_both_spellings_of_dtype(spelling: dict[str, str]) -> None:
    assert read_spec(LLAMA | spelling, "config.json").dtype == "bfloat16"


def test_end_ids_are_the_union_of_all_sources(folder: Path) -> None:
    edit(folder, "config.json", eos_token_id=3)
    edit(folder, "generation_config.json", eos_token_id=[4, 3])
    edit(
        folder,
        "tokenizer_config.json",
        eos_token={"content": "<end>"},
        added_tokens_decoder={"5": {"content": "<end>"}},
    )
    assert open_checkpoint(folder).eos_token_ids == (3, 4, 5)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 9, "content": "<end>"}]},
        {"added_tokens": [], "model": {"vocab": {"<end>": 9}}},
    ],
    ids=["added", "vocabulary"],
)
def test_the_end_token_is_looked_up_in_tokenizer_json(
    folder: Path, tokenizer: dict[str, Any]
) -> None:
    edit(folder, "tokenizer_config.json", eos_token="<end>")
    edit(folder, "tokenizer.json", **tokenizer)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == (9,)
    assert checkpoint.tokenizer_path == folder / "tokenizer.json"


def test_a_folder_without_extras_has_none(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == ()
    assert checkpoint.chat_template is None
    assert checkpoint.tokenizer_path is None
    assert checkpoint.default_sampling == {}


def test_the_template_file_beats_the_tokenizer_config(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", chat_template="from config")
    assert open_checkpoint(folder).chat_template == "from config"
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    edit(folder, "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(folder).chat_template == "plain"
    (folder / "chat_template.jinja").write_text("from file")
    assert open_checkpoint(folder).chat_template == "from file"


TOOL_USE = " \n{% for t in tools %} {{ t }}\n{% endfor %}\n  "
DEFAULT = "\n{%- set x = 1 %}\nplain{{ x }}\n\n"


@pytest.mark.parametrize("place", ["folder", "tokenizer"])
def test_another_template_where_there_are_tools(folder: Path, place: str) -> None:
    from jinja2 import Environment

    if place == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
        (folder / "chat_template.jinja").write_text(DEFAULT)
    else:
        texts = {"tool_use": TOOL_USE, "default": DEFAULT}
        named = [{"name": name, "template": text} for name, text in texts.items()]
        edit(folder, "tokenizer_config.json", chat_template=named)
    source = open_checkpoint(folder).chat_template
    assert source is not None
    jinja = Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers has it
    both = jinja.from_string(source)
    tools = ["a", "b"]
    assert both.render(tools=tools) == jinja.from_string(TOOL_USE).render(tools=tools)
    nothing: list[list[str] | None] = [None, []]
    for none in nothing:
        assert both.render(tools=none) == jinja.from_string(DEFAULT).render()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"temperature": None, "top_p": 1.0, "top_k": 0}, {"top_p": 1.0, "top_k": 0}),
        ({"do_sample": None, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"max_length": 20, "max_new_tokens": 5, "num_beams": 4, "pad_token_id": 0}, {}),
        ({"min_p": 0.1, "repetition_penalty": 1.0}, {"min_p": 0.1, "repetition_penalty": 1.0}),
    ],
)
def test_which_keys_of_generation_config_count(
    folder: Path, given: dict[str, Any], taken: dict[str, Any]
) -> None:
    edit(folder, "generation_config.json", **given)
    assert open_checkpoint(folder).default_sampling == taken


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ([3, 4], None, (3, 4)),
        (3, [3, 4, 3], (3, 4)),
        (None, [5], (5,)),
        ([], 6, (6,)),
        (3, [], (3,)),
    ],
)
def test_end_ids_may_be_lists_anywhere(
    folder: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    edit(folder, "config.json", eos_token_id=config)
    edit(folder, "generation_config.json", eos_token_id=generation)
    assert open_checkpoint(folder).eos_token_ids == expected


def test_sampling_defaults(folder: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    edit(folder, "generation_config.json", **values, do_sample=True, max_new_tokens=5)
    assert open_checkpoint(folder).default_sampling == values
    edit(folder, "generation_config.json", do_sample=False)
    assert open_checkpoint(folder).default_sampling == {"repetition_penalty": 1.1}


def test_sampling_defaults_out_of_range_are_refused(folder: Path) -> None:
    edit(folder, "generation_config.json", temperature=-1.0)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be in"):
        open_checkpoint(folder)


def test_remote_code_is_never_looked_at(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    edit(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": "evil.Tokenizer"})
    assert open_checkpoint(folder).spec.architecture == "LlamaForCausalLM"


def test_pickles_beside_safetensors_stay_closed(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert set(open_checkpoint(folder).tensor_files.values()) == {folder / "model.safetensors"}
