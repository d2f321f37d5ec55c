"""End ids, chat template, sampling defaults and the tokenizer's window of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..api import SamplingParams
from ..errors import CheckpointError, InvalidRequestError
from .fields import check_id, id_list, read_json

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def find_eos_ids(folder: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every end id that config.json, generation_config.json or the tokenizer names, once each.

    Raises:
        CheckpointError: one of them is no token id of the model.
    """
    ids = _configured_ids(folder, config, "eos_token_id", vocab_size)
    return tuple(dict.fromkeys((*ids, *_tokenizer_eos(folder, vocab_size))))


def find_bos_id(folder: Path, config: Mapping[str, Any], vocab_size: int) -> int | None:
    """The beginning token that config.json names, else that of generation_config.json.

    Raises:
        CheckpointError: one of them is no token id of the model.
    """
    return next(iter(_configured_ids(folder, config, "bos_token_id", vocab_size)), None)


def _configured_ids(
    folder: Path, config: Mapping[str, Any], key: str, vocab_size: int
) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    files = {folder / "config.json": config, generation: read_optional_json(generation)}
    return tuple(
        token_id
        for path, values in files.items()
        for token_id in id_list(values.get(key), f"{path}: {key}", vocab_size)
    )


def find_chat_template(folder: Path) -> str | None:
    """``chat_template.jinja``, else the template of tokenizer_config.json.

    Of several the one called ``default``; the one called ``tool_use``, if there is one, where there are tools.

    Raises:
        CheckpointError: a file cannot be read.
    """
    default: Any = _read_text(folder / "chat_template.jinja")
    tool_use: Any = _read_text(folder / "additional_chat_templates" / "tool_use.jinja")
    if default is None:
        default = read_optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(default, list):
        named = {t.get("name"): t.get("template") for t in default if isinstance(t, dict)}
        default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        return None
    return _either(tool_use, default) if isinstance(tool_use, str) else default


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _either(tool_use: str, default: str) -> str:
    """One template of two. The empty expressions keep Jinja from trimming what belongs to either."""
    keep = "{{ '' }}"
    first, second = (text.removesuffix("\n") for text in (tool_use, default))
    return f"{{% if tools %}}{keep}{first}{keep}{{% else %}}{keep}{second}{keep}{{% endif %}}"


def find_default_sampling(folder: Path) -> dict[str, Any]:
    """Sampling defaults of generation_config.json, under the names of :class:`SamplingParams`.

    ``repetition_penalty`` always counts. ``temperature``, ``top_p``, ``top_k`` and ``min_p`` count
    unless ``do_sample`` is false, since transformers then ignores them. Lengths are the request's
    business and never taken.

    Raises:
        CheckpointError: a value is out of its range.
    """
    path = folder / "generation_config.json"
    generation = read_optional_json(path)
    keys: tuple[str, ...] = ("repetition_penalty",)
    if generation.get("do_sample") is not False:
        keys += _SAMPLING_KEYS
    defaults = {key: generation[key] for key in keys if generation.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return defaults


def find_tokenizer_window(folder: Path) -> int | None:
    """``model_max_length`` of tokenizer_config.json. ``None``: there is none, or it is no length.

    A number past all windows, which transformers writes where it knows none, is as good as none.
    """
    length = read_optional_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, (int, float)):
        return None
    return int(length) if 1 <= length < 1 << 31 else None


def _tokenizer_eos(folder: Path, vocab_size: int) -> Iterator[int]:
    """The ids of ``eos_token``, a text, in tokenizer_config.json and special_tokens_map.json."""
    path = folder / "tokenizer_config.json"
    config = read_optional_json(path)
    special = read_optional_json(folder / "special_tokens_map.json")
    for text in dict.fromkeys(_token_text(file.get("eos_token")) for file in (config, special)):
        if (token_id := _token_id(folder, config, text)) is not None:
            check_id(token_id, f"{path}: eos_token {text!r}", vocab_size)
            yield token_id


def _token_text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _token_id(folder: Path, config: Mapping[str, Any], text: Any) -> int | None:
    if not isinstance(text, str):
        return None
    token_id = _id_in_decoder(config, text)
    if token_id is None:
        token_id = _id_in_tokenizer(read_optional_json(folder / "tokenizer.json"), text)
    return token_id


def _id_in_decoder(config: Mapping[str, Any], text: str) -> int | None:
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token_id, token in decoder.items():
            if isinstance(token, dict) and token.get("content") == text and token_id.isdecimal():
                return int(token_id)
    return None


def _id_in_tokenizer(tokenizer: Mapping[str, Any], text: str) -> int | None:
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text:
            return _as_id(token.get("id"))
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return _as_id(vocab.get(text)) if isinstance(vocab, dict) else None


def _as_id(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
