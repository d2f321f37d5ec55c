"""The command line: help, precedence, and refusals in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import __version__
from octavo.engine.config.options import flag_of
from octavo.engine.config.sections import all_options, default_text
from octavo.engine.errors import ConfigError
from octavo.server.cli import main, resolve, serve_parser
from octavo.server.peer_flags import PEER_FLAGS
from octavo.server.presets import preset_names


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever would be started, without starting it."""
    started: list[Any] = []

    def run(*configs: Any) -> int:
        started.append(configs)
        return 0

    monkeypatch.setattr("octavo.server.launch.run", run)
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    return started


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str], started: list[Any]) -> str:
    assert main(["serve", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("octavo: ")
    assert output.err.count("\n") == 1
    assert started == []
    return output.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_no_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "serve" in capsys.readouterr().err


def test_help_shows_every_flag_with_unit_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = serve_parser().format_help()
    words = " ".join(text.split())
    for section, option in all_options():
        unit = f" Unit: {option.metadata['unit']}." if option.metadata["unit"] else ""
        assert f"\n{section}:\n" in text
        assert f" {flag_of(option.name)}" in words
        assert f"{option.metadata['help']}{unit} Default: {default_text(option)}." in words


def test_defaults() -> None:
    engine, server = resolve([])
    assert engine.model.model is None
    assert (server.host, server.port) == ("127.0.0.1", 8000)


def test_flags_become_options() -> None:
    engine, server = resolve(
        [
            *("models/tiny", "--max-model-len", "4Ki", "--kv-cache-memory-bytes=2GiB"),
            *("--check-invariants", "--watermark", "0.1", "--served-model-name", "a", "b"),
            *("--port", "0", "--host", "::1", "--seed", "-5"),
        ]
    )
    assert engine.model.model == "models/tiny"
    assert engine.model.max_model_len == 4096
    assert engine.model.seed == -5
    assert engine.cache.kv_cache_memory_bytes == 2 << 30
    assert engine.scheduler.check_invariants is True
    assert engine.scheduler.watermark == 0.1
    assert server.served_model_name == ("a", "b")
    assert (server.host, server.port) == ("::1", 0)


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(
        "max-num-seqs: 7\nblock_size: 32\nkv-cache-memory-bytes: 64Mi\napi-key: secret\n"
        "check-invariants: true\n"
    )
    arguments = ["--config", str(path), "--block-size", "8", "--no-check-invariants"]
    engine, server = resolve(arguments)
    assert engine.scheduler.max_num_seqs == 7
    assert engine.cache.block_size == 8
    assert engine.cache.kv_cache_memory_bytes == 64 << 20
    assert engine.scheduler.check_invariants is False
    assert server.api_key == ("secret",)


def test_every_preset_loads_by_its_bare_name() -> None:
    names = preset_names()
    assert {"cpu-small", "gpu-default"} <= set(names)
    defaults = resolve([])
    for name in names:
        assert resolve(["--config", name]) != defaults


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max-num-sequences: 5", "did you mean --max-num-seqs?"),
        ("tensor_parallel_size: 2", "--tensor-parallel-size is not offered"),
        ("max-num-seqs: 5\nmax_num_seqs: 6", "given twice"),
        ("max-num-seqs: many", "--max-num-seqs must be"),
        ("port: 70000", "--port must be at most 65535"),
        ("port: true", "--port must be"),
        ("port:", "--port needs a value"),
        ("kv-cache-memory-bytes: 2 pounds", "--kv-cache-memory-bytes must be a whole number"),
        ("api-key: 12345", "--api-key must be a text"),
        ("- a", "must hold options"),
        ("a: [", "cannot be read"),
    ],
)
def test_wrong_files(
    content: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_launch: list[Any],
) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(content)
    message = refusal(["--config", str(path)], capsys, no_launch)
    assert expected in message
    assert "12345" not in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "--port must be at most 65535"),
        (["--port", "-1"], "--port must be at least 0"),
        (["--port", "x"], "--port must be a whole number, got 'x'"),
        (["--port"], "--port needs a value"),
        (["--max-model-len", "32x"], "--max-model-len must be a whole number"),
        (["--max-model-len", "inf"], "--max-model-len must be a whole number"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be at most 1"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization must be"),
        (["--swap-space", "-1"], "--swap-space must be at least 0"),
        (["--preemption-mode", "x"], "--preemption-mode must be one of auto, recompute, swap"),
        (["--dtype", "int8"], "--dtype must be one of auto"),
        (["--config", "nowhere"], "neither a file nor a preset (cpu-small"),
        (["--prot", "1"], "did you mean --port?"),
        (["--zzzzzz"], "see octavo serve --help"),
        (["--api-keyy=hunter2"], "did you mean --api-key?"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", "a", "b\nc"], "must be printable, on one line, got 'b\\nc'"),
        (["--served-model-name", "a\x1b[2J"], "must be printable, on one line, got 'a\\x1b[2J'"),
        (["a", "--model", "b"], "exclude each other"),
        (["a", "b"], "'b'"),
    ],
)
def test_wrong_flags(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    no_launch: list[Any],
) -> None:
    message = refusal(arguments, capsys, no_launch)
    assert expected in message
    assert "hunter2" not in message


@pytest.mark.parametrize("flag", sorted(PEER_FLAGS))
def test_flags_of_peers_are_answered_by_name(
    flag: str, capsys: pytest.CaptureFixture[str], no_launch: list[Any]
) -> None:
    for arguments in ([flag, "5"], [f"{flag}=5"]):
        assert f"{flag} is not offered: " in refusal(arguments, capsys, no_launch)


def test_switches_of_peers_are_answered_in_their_negative_form(
    capsys: pytest.CaptureFixture[str], no_launch: list[Any]
) -> None:
    message = refusal(["--no-enable-chunked-prefill"], capsys, no_launch)
    assert "--no-enable-chunked-prefill is not offered" in message


def test_flags_of_the_memory() -> None:
    engine, server = resolve([])
    assert engine.cache.enable_prefix_caching is True
    assert (engine.cache.swap_space, engine.scheduler.preemption_mode) == (0.0, "auto")
    assert server.enable_debug_endpoints is False
    engine, server = resolve(
        [
            *("--no-enable-prefix-caching", "--swap-space", "0.5", "--preemption-mode", "swap"),
            "--enable-debug-endpoints",
        ]
    )
    assert engine.cache.enable_prefix_caching is False
    assert (engine.cache.swap_space, engine.scheduler.preemption_mode) == (0.5, "swap")
    assert server.enable_debug_endpoints is True


def test_peers_names_for_host_memory_lead_to_ours(
    capsys: pytest.CaptureFixture[str], no_launch: list[Any]
) -> None:
    assert "--swap-space" in refusal(["--kv-offloading-size", "4"], capsys, no_launch)


def test_no_flag_is_both_offered_and_refused() -> None:
    assert not PEER_FLAGS.keys() & {flag_of(option.name) for _, option in all_options()}


def test_the_environment_gives_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert resolve([])[1].api_key == ("secret",)
    assert resolve(["--api-key", "other"])[1].api_key == ("other",)


def test_refusals_of_the_start_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_configs: Any) -> int:
        raise ConfigError("mo\ndel: no such file.")

    monkeypatch.setattr("octavo.server.launch.run", refuse)
    assert main(["serve", "mo\ndel"]) == 2
    assert capsys.readouterr().err == "octavo: mo\\ndel: no such file.\n"
