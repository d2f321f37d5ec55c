"""A GGUF file in parts is the same model as the whole file, or is refused by the part that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.gguf_file import GGUFFile
from octavo.engine.checkpoint.gguf_split import open_gguf
from octavo.engine.config.server_config import ServerConfig
from octavo.engine.errors import CheckpointError
from octavo.kernels.reference import ReferenceOps
from octavo.server.launch import model_names

TOKENS = [5, 6, 7, 8, 9]


def part_path(folder: Path, index: int, count: int) -> Path:
    return folder / f"model-{index + 1:05d}-of-{count:05d}.gguf"


def write_part(
    path: Path, whole: GGUFFile, names: Sequence[str], index: int, count: int, **changes: int
) -> None:
    """One part, as llama.cpp's ``gguf-split`` writes it: the first with all the metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in whole.metadata.items() if index == 0 else ():
        if key in ("general.architecture", "general.alignment"):
            continue
        writer.add_key_value(key, value, kind_of(value))
    keys = {"split.no": index, "split.count": count, "split.tensors.count": len(whole.tensors)}
    for key, number in (keys | changes).items():
        writer.add_int32(key, number) if "tensors" in key else writer.add_uint16(key, number)
    for name in names:
        tensor = whole.tensors[name]
        writer.add_tensor(name, whole.read(name).view("<f4").reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[kinds[type(value)]]


@pytest.fixture
def whole(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> GGUFFile:
    (tmp_path / "whole").mkdir()
    write_gguf(make_tiny(), tmp_path / "whole" / "whole.gguf")
    return GGUFFile.open(tmp_path / "whole" / "whole.gguf")


@pytest.fixture
def split(tmp_path: Path, whole: GGUFFile) -> Callable[..., Path]:
    """Writes the file in three parts, the first without tensors; gives the first."""

    def write(**changes: dict[str, int]) -> Path:
        """``changes``: keys of a part's ``split.*`` ("part2")."""
        names = list(whole.tensors)
        parts = [[], names[:7], names[7:]]
        for index, part in enumerate(parts):
            keys = changes.get(f"part{index + 1}", {})
            write_part(part_path(tmp_path, index, 3), whole, part, index, 3, **keys)
        return part_path(tmp_path, 0, 3)

    return write


def test_parts_give_the_logits_of_the_whole(
    whole: GGUFFile, split: Callable[..., Path], load: Callable[..., Any], feed: Callable[..., Any]
) -> None:
    ops = ReferenceOps()
    expected = feed(load(whole.path, ops), ops, TOKENS, [5])
    first = split()
    for path in (first, first.parent):
        assert torch.equal(feed(load(path, ops), ops, TOKENS, [5]), expected)
    checkpoint = open_checkpoint(first.parent)
    assert checkpoint.path == first
    assert checkpoint.spec == open_checkpoint(whole.path).spec


def test_the_whole_file_can_be_named_by_its_folder(whole: GGUFFile) -> None:
    assert open_checkpoint(whole.path.parent).path == whole.path


def test_image_encoders_are_no_models(whole: GGUFFile) -> None:
    (whole.path.parent / "mmproj-whole.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(whole.path.parent).path == whole.path


@pytest.mark.parametrize("index", [1, 2])
def test_a_later_part_names_the_first(split: Callable[..., Path], index: int) -> None:
    first = split()
    with pytest.raises(CheckpointError, match=f"give the first, {first}"):
        open_checkpoint(part_path(first.parent, index, 3))


@pytest.mark.parametrize("index", [1, 2])
def test_a_missing_part_is_named(split: Callable[..., Path], index: int) -> None:
    first = split()
    missing = part_path(first.parent, index, 3)
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"{missing} is missing.*3 files"):
        open_checkpoint(first)


def test_a_missing_first_part_is_named_for_its_folder(split: Callable[..., Path]) -> None:
    first = split()
    first.unlink()
    part_path(first.parent, 2, 3).unlink()
    with pytest.raises(CheckpointError, match=f"give the first, {first}"):
        open_checkpoint(first.parent)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"part2": {"split.no": 2}}, "00002-of-00003.gguf is not part 2 of 3"),
        ({"part3": {"split.count": 4}}, "00003-of-00003.gguf is not part 3 of 3"),
        ({"part1": {"split.count": 4}}, "must end in -00001-of-00004.gguf"),
        ({"part1": {"split.tensors.count": 30}}, "speaks of 30 tensors; its 3 parts hold 21"),
    ],
)
def test_parts_that_do_not_belong_together(
    split: Callable[..., Path], changes: dict[str, dict[str, int]], pattern: str
) -> None:
    with pytest.raises(CheckpointError, match=pattern):
        open_gguf(split(**changes))


def test_a_tensor_in_two_parts(split: Callable[..., Path], whole: GGUFFile) -> None:
    first = split()
    write_part(part_path(first.parent, 2, 3), whole, list(whole.tensors), 2, 3)
    with pytest.raises(CheckpointError, match=r"00003.* tensor \S+ is in .*00002"):
        open_gguf(first)


def test_a_tensor_of_another_shape_in_a_part(
    split: Callable[..., Path], whole: GGUFFile, load: Callable[..., Any]
) -> None:
    first = split()
    last = list(whole.tensors)[-1]
    tensor = whole.tensors[last]
    content = part_path(first.parent, 2, 3).read_bytes()
    at = content.index(np.uint64(len(last)).tobytes() + last.encode()) + 8 + len(last) + 4
    size = np.uint64(tensor.shape[-1]).tobytes()
    assert content[at : at + 8] == size
    halved = content[:at] + np.uint64(tensor.shape[-1] // 2).tobytes() + content[at + 8 :]
    part_path(first.parent, 2, 3).write_bytes(halved)
    with pytest.raises(CheckpointError, match=f"tensor {last} has shape"):
        load(first, ReferenceOps())


def test_the_served_name_is_the_whole_files(split: Callable[..., Path]) -> None:
    assert model_names(str(split()), ServerConfig()) == ("model",)
