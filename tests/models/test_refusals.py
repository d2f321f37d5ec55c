"""Every unusable checkpoint is refused with one sentence that names what is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.families import families, family_of
from octavo.engine.checkpoint.gguf_file import GGUFFile
from octavo.engine.checkpoint.hf_config import read_spec
from octavo.engine.errors import CheckpointError
from octavo.engine.models.family import Family
from octavo.engine.models.loader import open_weights
from octavo.kernels.reference import ReferenceOps

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
    return save(make_tiny())


@pytest.fixture
def gguf_path(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> Path:
    write_gguf(make_tiny(), tmp_path / "model.gguf", eos_token_id=2)
    return tmp_path / "model.gguf"


def refused(path: Path, pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


# --- config.json --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"architectures": ["MambaModel"]}, "MambaModel is not supported.*Mistral"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["a\nb"]}, "architectures must be a string on one line"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer.*'64'"),
        ({"hidden_size": 1 << 40}, "hidden_size must be a positive integer below"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"num_hidden_layers": 10**6}, "1000000 layers"),
        ({"max_position_embeddings": 1 << 30}, "1073741824 positions"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, "15 rotated numbers per head"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported for Llama.*octavo knows silu"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of float32"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope type proportional"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope parameters lacks factor"),
        ({"rope_parameters": {"rope_type": "yarn", "truncate": 1}}, "truncate must be true or"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 7}},
            "short_factor must be a list of 8 numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [0.0] * 8}},
            "short_factor must be a positive number",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
            "long_factor must be a list of 8 numbers, got None",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope parameters lacks factor"),
        ({"rope_parameters": ["linear"]}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor must be at most 1"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "silu\n"}, r"hidden_act must be a string on one line, got 'silu\\n'"),
        ({"hidden_size": [1] * 10**4}, r"hidden_size must be .*, got \[1, 1, .{,200}\.\.\.\.$"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1e308}}, "2147483647 positions"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
            "rope_theta of 1.0 with yarn; it must exceed 1",
        ),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "factor": 2.0},
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings must be more than 1",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1 for LlamaForCausalLM, got 0.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            r"rope_parameters must be one object for all layers, got \['full_attention'\]",
        ),
    ],
)
def test_configs(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{pattern}"):
        read_spec(LLAMA | changes, "config.json")


@pytest.mark.parametrize("family", families(), ids=lambda family: type(family).__name__)
def test_layers_are_counted_before_they_are_described(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes of config.json could ask for so many that the memory does not hold them."""

    def never(*arguments: Any) -> NoReturn:
        raise AssertionError("was described")

    monkeypatch.setattr(type(family), "read_config", never)
    config = LLAMA | {"architectures": list(family.architectures), "num_hidden_layers": 2**31 - 1}
    with pytest.raises(CheckpointError, match="2147483647 layers"):
        read_spec(config, "config.json")


def test_experts_are_counted_before_they_are_named() -> None:
    sizes = {"num_hidden_layers": 1024, "num_local_experts": 1024}
    config = LLAMA | sizes | {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
    with pytest.raises(CheckpointError, match="1048576 experts in all layers"):
        read_spec(config, "config.json")


@pytest.mark.parametrize("name", ["Mistral", "Mixtral", "Phi3", "Qwen3Moe", "Qwen2", "SmolLM3"])
def test_a_window_of_nothing(name: str) -> None:
    config = LLAMA | {"architectures": [f"{name}ForCausalLM"], "num_key_value_heads": 2}
    changes = {"sliding_window": 0, "use_sliding_window": True}
    with pytest.raises(CheckpointError, match="sliding_window must be a positive integer"):
        read_spec(config | changes, "config.json")


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\ud800", "[" * 100_000])
def test_config_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder, r"config\.json (is not valid JSON|must hold one JSON object)")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["</s>", -1, True, [1, "x"], 96, [1, 96]])
def test_ends_of_text_that_are_no_tokens(folder: Path, name: str, key: str, value: Any) -> None:
    (folder / "generation_config.json").write_text("{}")
    edit_json(folder / name, **{key: value})
    why = "must be a token id|names the token 96, which is outside the vocabulary of 96"
    refused(folder, rf"/{re.escape(name)}: {key} ({why})")


def test_an_end_token_outside_the_vocabulary(folder: Path) -> None:
    token = {"eos_token": "<end>", "added_tokens_decoder": {"96": {"content": "<end>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(token))
    refused(folder, r"/tokenizer_config\.json: eos_token '<end>' names the token 96, .* of 96")


def test_an_architecture_without_a_model() -> None:
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel is not supported"):
        family_of("GPT2LMHeadModel")


# --- folders and safetensors --------------------------------------------------------------------
def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "org" / "name", "There is no model at .*a repository of the Hub as ORG/NAME")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path, r"has neither config\.json nor a GGUF file")


def test_a_folder_with_several_gguf_files(gguf_path: Path) -> None:
    shutil.copy(gguf_path, gguf_path.with_name("other.gguf"))
    refused(gguf_path.parent, r"several models: model\.gguf, other\.gguf; give the path of one")


def test_a_folder_with_pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin, which can run code.*safetensors and GGUF only")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_short_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, r"model\.safetensors is damaged or too short")


def test_a_missing_shard(make_tiny: Callable[..., Any], save: Callable[..., Path]) -> None:
    folder = save(make_tiny(), max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refused(folder, re.escape(f"names the file {shard.name}, which is not beside it"))


def test_an_index_that_points_outside(
    make_tiny: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(make_tiny(), max_shard_size="100KB")
    edit_json(
        folder / "model.safetensors.index.json", weight_map={"lm_head.weight": "../x.safetensors"}
    )
    refused(folder, r"names the file \.\./x\.safetensors")


def test_an_index_that_disagrees_with_its_shards(
    make_tiny: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(make_tiny(), max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=names | {"model.extra.weight": names["lm_head.weight"]})
    refused(folder, r"lacks tensor model\.extra\.weight")
    edit_json(index, weight_map={})
    refused(folder, "has no weight_map")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda t: t.pop("lm_head.weight"), r"lacks the tensor lm_head\.weight"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.1" in n], r"lacks the tensors .* 4 more"),
        (
            lambda t: t.update({"model.layers.7.x": torch.zeros(1)}),
            r"holds the tensor model\.layers\.7\.x, which the model has no place for",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            r"tensor model\.norm\.weight has shape \[63\], the model needs \[64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"tensor model\.norm\.weight has type I8; octavo reads",
        ),
    ],
    ids=["missing", "many-missing", "unexpected", "mis-shaped", "integers"],
)
def test_tensors_that_do_not_fit(
    folder: Path, change: Callable[[Any], Any], pattern: str, load: Callable[..., Any]
) -> None:
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=pattern):
        load(folder, ReferenceOps())


def test_saved_frequencies_are_ignored(folder: Path, load: Callable[..., Any]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert load(folder, ReferenceOps()).num_layers == 2


def test_a_tied_head_may_be_saved_but_not_differ(
    make_tiny: Callable[..., Any], save: Callable[..., Path], load: Callable[..., Any]
) -> None:
    folder = save(make_tiny(tie_word_embeddings=True))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert load(folder, ReferenceOps()).num_layers == 2
    change_tensors(folder, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight .* holds one that differs"):
        load(folder, ReferenceOps())


# --- GGUF ---------------------------------------------------------------------------------------
def header(version: int = 3, num_tensors: int = 0, num_values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    parts = (string(name), struct.pack("<I", len(dims)), struct.pack(f"<{len(dims)}Q", *dims))
    return b"".join(parts) + struct.pack("<IQ", kind, offset)


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "is not a GGUF file"),
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (b"GGUF", "ends inside its header"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(version=1), "GGUF version 1; octavo reads versions 2 and 3"),
        (header()[:-1], "ends inside its header"),
        (header(num_values=HUGE), "ends inside its header"),
        (header(num_tensors=HUGE), "ends inside its header"),
        (header(num_values=1) + struct.pack("<Q", HUGE), "ends inside its header"),
        (header(num_values=1) + string("k") + struct.pack("<I", 99), "k has the unknown type 99"),
        (
            header(num_values=1) + string("k") + struct.pack("<IIQ", 9, 8, HUGE),
            "ends inside its header",
        ),
        (
            header(num_values=1) + string("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE),
            "ends inside its header",
        ),
        (
            header(num_values=1) + string("k") + struct.pack("<IIQ", 9, 6, HUGE),
            "ends inside its header",
        ),
        (
            header(num_values=1) + string("k") + struct.pack("<IIQ", 9, 9, 1),
            "k is an array of the unreadable type 9",
        ),
        (header(num_values=2) + 2 * (string("k") + struct.pack("<IB", 0, 1)), "k occurs twice"),
        (
            header(num_values=1) + string("general.alignment") + struct.pack("<II", 4, 0),
            "general.alignment is 0",
        ),
        (header(num_tensors=1) + tensor(dims=(1,) * 5), "t has 5 dimensions"),
        (header(num_tensors=1) + tensor(kind=16), "tensor t has type IQ2_XXS; octavo reads F32"),
        (header(num_tensors=1) + tensor(kind=77), "tensor t has type number 77"),
        (header(num_tensors=1) + tensor(dims=(33,), kind=2), "t are no multiple of 32"),
        (header(num_tensors=1) + tensor(), "is too short: tensor t ends at byte"),
        (header(num_tensors=1) + tensor(dims=(HUGE, HUGE)) + bytes(64), "is too short"),
        (header(num_tensors=1) + tensor(offset=HUGE) + bytes(256), "is too short"),
        (header(num_tensors=2) + 2 * tensor(dims=(0,)) + bytes(64), "t occurs twice"),
    ],
)
def test_damaged_gguf_headers(tmp_path: Path, content: bytes, pattern: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(path, pattern)


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_short_gguf_file(gguf_path: Path, cut: int) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:-cut])
    refused(gguf_path, r"model\.gguf is too short: tensor .* ends at byte \d+, the file at \d+")


def test_a_name_that_no_file_can_have() -> None:
    for name in ("a" * 300, "a\0b"):
        refused(Path(name) / "b", "There is no model at a")


def write_metadata(path: Path, **values: Any) -> None:
    writer = gguf.GGUFWriter(path, values.pop("architecture", "llama"))
    name = values.pop("tensor", "token_embd.weight")
    for key, value in values.items():
        add = getattr(writer, f"add_{key}")
        if isinstance(value, list) and key != "head_count_kv":  # where the writer knows no list
            add(0)
            full = next(reversed(writer.kv_data[0]))
            writer.kv_data[0].pop(full)
            writer.add_array(full, value)
        else:
            add(value)
    writer.add_tensor(name, np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIZES = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "head_count": 4,
    "layer_norm_rms_eps": 1e-5,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"architecture": "mamba"}, "architecture mamba is not supported.*llama"),
        ({"expert_count": 8}, "lacks expert_used_count"),
        ({"block_count": 0}, "block_count must be a positive integer"),
        ({"head_count_kv": [1, 2]}, "attention.head_count_kv must be a positive integer"),
        ({"head_count_kv": 3}, "4 query heads cannot share 3"),
        ({"value_length": 8}, "attention.value_length must be 16"),
        ({"rope_dimension_count": 8}, "rope.dimension_count must be the head's size 16"),
        ({"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "longrope without the tensor rope_"),
        ({"eos_token_id": 96}, r"ggml\.eos_token_id names the token 96, .* vocabulary of 96"),
        ({"eot_token_id": 96}, r"ggml\.eot_token_id names the token 96, .* vocabulary of 96"),
        ({"bos_token_id": 96}, r"ggml\.bos_token_id names the token 96, .* vocabulary of 96"),
        ({"block_count": 2**31 - 1, "architecture": "gemma2"}, "2147483647 layers"),
        ({"layer_norm_eps": [1.0, 2.0]}, "layer_norm_epsilon must be a positive number"),
        ({"sampling_top_k": [1, 2]}, r"general\.sampling: top_k must be"),
    ],
)
def test_gguf_metadata(tmp_path: Path, values: dict[str, Any], pattern: str) -> None:
    write_metadata(tmp_path / "model.gguf", **(SIZES | values))
    refused(tmp_path / "model.gguf", pattern)


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_the_attention_factor_of_a_gguf_file_counts_with_every_scaling(
    tmp_path: Path, kind: str
) -> None:
    scaling = {
        "rope_scaling_type": gguf.RopeScalingType(kind),
        "rope_scaling_factor": 2.0,
        "rope_scaling_attn_factors": 1.25,
    }
    write_metadata(tmp_path / "model.gguf", **SIZES, **scaling)
    assert open_checkpoint(tmp_path / "model.gguf").spec.rope.attention_factor == 1.25


def test_gguf_metadata_that_lacks_a_size(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "context_length"}
    write_metadata(tmp_path / "model.gguf", **sizes)
    refused(tmp_path / "model.gguf", "lacks context_length")


def test_gguf_sampling_out_of_its_range(tmp_path: Path) -> None:
    write_metadata(tmp_path / "model.gguf", sampling_top_p=1.5, **SIZES)
    refused(tmp_path / "model.gguf", r"general\.sampling: top_p must be")


def test_missing_gguf_tensors_go_by_their_own_names(
    tmp_path: Path, load: Callable[..., Any]
) -> None:
    write_metadata(tmp_path / "model.gguf", **SIZES)
    with pytest.raises(CheckpointError, match=r"lacks the tensors blk\.0\.attn_q\.weight, .* more"):
        load(tmp_path / "model.gguf", ReferenceOps())


def test_gguf_names_that_stand_for_one_matrix_of_several(tmp_path: Path) -> None:
    """Such a tensor would be taken for a part of one that is not there."""
    path = tmp_path / "model.gguf"
    write_metadata(path, tensor="blk.0.ffn_up_exps[0].weight", **SIZES)
    with pytest.raises(CheckpointError, match=r"a tensor is called 'blk\.0\.ffn_up_exps\[0\]"):
        open_weights(open_checkpoint(path))


def test_a_file_that_shrinks_after_it_was_opened(gguf_path: Path) -> None:
    file = GGUFFile.open(gguf_path)
    gguf_path.write_bytes(gguf_path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"tensor output_norm\.weight cannot be read"):
        file.read("output_norm.weight")


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_corrupt_header_gives_a_checkpoint_error_or_a_model(
    gguf_path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Bytes of the header replaced, removed or inserted: no other error, crash or hang."""
    content = bytearray(gguf_path.read_bytes())
    header_size = min(tensor.offset for tensor in GGUFFile.open(gguf_path).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, header_size - 1))
        length = data.draw(st.integers(0, 16))
        content[start : start + length] = data.draw(st.binary(max_size=16))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        assert open_checkpoint(damaged).spec.vocab_size > 0


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
