from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from octavo.engine.checkpoint.checkpoint import Checkpoint
from octavo.engine.errors import CheckpointError, InvalidRequestError
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

BEGIN_WITH_S = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
BOS_AND_EOS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
HI = 258


def load(folder: Path, num_rows: int = 259) -> Tokenizer:
    """A checkpoint of which only what the tokenizer looks at is there."""
    file = folder / "tokenizer.json"
    checkpoint = SimpleNamespace(
        path=folder,
        gguf=None,
        spec=SimpleNamespace(vocab_size=num_rows),
        tokenizer_path=file if file.is_file() else None,
    )
    return load_tokenizer(cast(Checkpoint, checkpoint))


def added(token: str, token_id: int, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, "special": special, **flags}


def test_reads_a_folder(write_folder: Any) -> None:
    tokenizer = load(write_folder(BOS_AND_EOS), num_rows=300)
    assert tokenizer.encode("hi") == [HI]
    assert tokenizer.decode([HI, 1, HI]) == "hihi"
    assert tokenizer.decode([HI, 1, HI], skip_special_tokens=False) == "hi</s>hi"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.vocab_size == 300
    assert tokenizer.max_token_chars == len("</s>")
    assert (tokenizer.special_token_id("</s>"), tokenizer.special_token_id("hi")) == (1, None)


def test_a_folder_without_tokenizer_json_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*save_pretrained.*--tokenizer"):
        load(tmp_path)


def test_another_tokenizer_can_be_named(write_folder: Any) -> None:
    folder = write_folder(BOS_AND_EOS)
    spec = SimpleNamespace(vocab_size=259)
    checkpoint = cast(Checkpoint, SimpleNamespace(path=Path("x.gguf"), gguf=object(), spec=spec))
    for path in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(checkpoint, str(path)).encode("hi") == [HI]


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_ends_of_text_outside_the_vocabulary_are_refused(write_folder: Any, name: str) -> None:
    """Else every text that begins with one would be refused, or none would ever end."""
    folder = write_folder({name: "hi"})
    with pytest.raises(
        CheckpointError, match=rf"tokenizer\.json: {name} 'hi' names the token {HI}"
    ):
        load(folder, num_rows=HI)
    assert load(folder, num_rows=HI + 1).encode("hi") == [HI]


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "Martian"}}'])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("post_processor", "add_bos", "begins"),
    [
        (None, None, False),
        (None, True, True),
        (BEGIN_WITH_S, None, True),
        (BEGIN_WITH_S, True, True),
        (BEGIN_WITH_S, False, False),
    ],
)
def test_the_beginning_token_comes_once(
    write_folder: Any, post_processor: Any, add_bos: bool | None, begins: bool
) -> None:
    config = BOS_AND_EOS | ({} if add_bos is None else {"add_bos_token": add_bos})
    tokenizer = load(write_folder(config, post_processor=post_processor))
    assert tokenizer.encode("hi") == [0] * begins + [HI]
    assert tokenizer.encode("") == [0] * begins
    assert tokenizer.encode("<s>hi") == [0, HI]
    assert tokenizer.encode("<s>hi", add_special_tokens=False) == [0, HI]


def test_truncation_and_padding_of_the_file_are_off(write_folder: Any) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    tokenizer = load(write_folder(truncation=truncation, padding=padding))
    assert len(tokenizer.encode("abcde")) == 5
    assert len(tokenizer.encode("a")) == 1


def test_ids_of_added_tokens_are_kept_where_they_leave_holes(write_folder: Any) -> None:
    tokens = [added("<x>", 259), added("<y>", 262), added("<z>", 300)]
    tokenizer = load(write_folder(added_tokens=tokens), num_rows=263)
    assert tokenizer.encode("<y>hi<x>") == [262, HI, 259]
    assert tokenizer.token_bytes(262) == b"<y>"
    assert [i for i in range(250, 310) if tokenizer.is_valid_id(i)] == [*range(250, 260), 262]
    assert tokenizer.first_invalid_id([0, 259, 261, 300]) == 261
    assert not tokenizer.is_valid_id(-1)
    with pytest.raises(InvalidRequestError, match=r"'<z>' \(300\).* only 263 tokens"):
        tokenizer.encode("hi<z>")


def test_more_rows_than_tokens(write_folder: Any) -> None:
    tokenizer = load(write_folder(), num_rows=320)
    assert not tokenizer.is_valid_id(319)
    assert tokenizer.decode([319, HI]) == "hi"
    assert tokenizer.token_bytes(319) == b""


def test_half_a_surrogate_pair_is_the_clients_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        byte_level.encode("a\ud800b")
    assert caught.value.param == "prompt"


def test_special_tokens_written_out_become_special_tokens(byte_level: Tokenizer) -> None:
    end = byte_level.special_token_id("<|end|>")
    assert end in byte_level.encode("user says <|end|> here")


def test_token_bytes_of_every_kind(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    space, end = byte_level.encode(" <|end|>")
    assert byte_level.token_bytes(space) == b" "
    assert byte_level.token_bytes(end) == b"<|end|>"
    assert sentencepiece.token_bytes(3 + 0xE9) == b"\xe9"
    assert sentencepiece.token_text(3 + 0xE9) == "\ufffd"
    assert sentencepiece.token_bytes(1) == b"<s>"
    (the,) = sentencepiece.encode("the", add_special_tokens=False)
    assert (sentencepiece.token_bytes(the), sentencepiece.decode([the])) == (b" the", "the")


def test_bytes_of_all_tokens_make_the_text(any_tokenizer: Tokenizer) -> None:
    text = "the naïve 🌶 of 2026\n\n好"
    token_ids = any_tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(any_tokenizer.token_bytes, token_ids)).decode().removeprefix(" ") == text


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("a b a")) == backend.decode([0, 1, 0]) == "a b a"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 2, "stop": 0},
            ],
        },
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
    ],
)
def test_decoders_that_are_not_known_are_refused_by_name(write_folder: Any, decoder: Any) -> None:
    folder = write_folder()
    data = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": decoder}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    kind = decoder["type"] if decoder["type"] != "Sequence" else "Fuse"
    with pytest.raises(CheckpointError, match=f"tokenizer.json has a decoder of the kind {kind}"):
        load(folder)


def test_encoding_leaves_other_threads_running(byte_level: Tokenizer) -> None:
    thread = threading.Thread(target=byte_level.encode, args=("some words, 123. " * 20_000,))
    start = time.perf_counter()
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.0005)
        num_turns += 1
    assert num_turns > 5, f"{num_turns} turns in {time.perf_counter() - start:.3f} s"
