"""Every way to rotate: octavo's angles are transformers', at every position that may come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from octavo.engine.build import build_core
from octavo.engine.checkpoint.hf_config import read_spec
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.models.rotary import inverse_frequencies, rotary_table
from octavo.kernels.ops import Ops

WINDOW = 256
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [1.0 + 1.5 * i for i in range(8)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic-within-its-window": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn-without-original-window": {"rope_type": "yarn", "factor": 2.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.7},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
    "yarn-one-mscale": YARN | {"mscale": 0.707},
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-not-truncated": YARN | {"truncate": False},
    "yarn-one-beta": YARN | {"beta_fast": 4.0, "beta_slow": 4.0},
    "longrope": LONG_ROPE,
    "longrope-factor": LONG_ROPE | {"factor": 16.0},
    "longrope-attention-factor": LONG_ROPE | {"attention_factor": 1.3},
    "longrope-factor-of-one": LONG_ROPE | {"factor": 1.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def config_of(rope: dict[str, Any], **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_theta": 5000.0} | rope,
        **changes,
    )


def table_of_transformers(embedding: Any, num_positions: int) -> Tensor:
    """Cosines, then sines, as :func:`rotary_table` has them."""
    cos, sin = embedding(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("theta", [5000.0, 1e6])
@pytest.mark.parametrize("way", WAYS)
def test_tables_are_those_of_transformers(way: str, theta: float) -> None:
    config = config_of(WAYS[way] | {"rope_theta": theta})
    spec = read_spec(config.to_dict(), "config.json")
    expected = table_of_transformers(LlamaRotaryEmbedding(config), WINDOW)
    torch.testing.assert_close(rotary_table(spec.rope, WINDOW), expected, rtol=0, atol=1e-6)


def test_the_ways_differ() -> None:
    """Guards the comparison above: no two tables are equal but those that must be."""
    tables = {
        way: rotary_table(read_spec(config_of(rope).to_dict(), "").rope, WINDOW)
        for way, rope in WAYS.items()
    }
    same = {
        frozenset((a, b))
        for a in tables
        for b in tables
        if a != b and torch.equal(tables[a], tables[b])
    }
    assert same == {
        frozenset(("default", "dynamic-within-its-window")),
        frozenset(("yarn", "yarn-one-mscale")),
    }


def test_longrope_is_chosen_by_the_longest_sequence_that_may_come() -> None:
    """transformers chooses by each sequence; up to the original window both take the short factors."""
    config = config_of(LONG_ROPE)
    rope = read_spec(config.to_dict(), "config.json").rope
    for num_positions, factors in ((64, SHORT), (65, LONG)):
        expected = inverse_frequencies(rope, num_positions) * torch.tensor(factors)
        plain = 1 / 5000.0 ** (torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(expected, plain)
        table = table_of_transformers(LlamaRotaryEmbedding(config), num_positions)
        torch.testing.assert_close(rotary_table(rope, num_positions), table, rtol=0, atol=1e-6)


def test_phi3_takes_its_own_original_window_and_old_names() -> None:
    rope = {key: value for key, value in LONG_ROPE.items() if not key.startswith("original")}
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": WINDOW,
    }
    config = Phi3Config(original_max_position_embeddings=32, rope_parameters=rope, **sizes)
    expected = table_of_transformers(Phi3RotaryEmbedding(config), WINDOW)
    plain = {key: value for key, value in rope.items() if key != "rope_type"}
    for name in ("longrope", "su", "yarn"):
        old = {"rope_scaling": plain | {"type": name}, "original_max_position_embeddings": 32}
        read = read_spec(
            sizes
            | old
            | {"architectures": ["Phi3ForCausalLM"], "vocab_size": 9}
            | {"num_hidden_layers": 1, "intermediate_size": 8},
            "config.json",
        )
        torch.testing.assert_close(rotary_table(read.rope, WINDOW), expected, rtol=0, atol=1e-6)


def test_an_outer_original_window_wins_as_in_transformers() -> None:
    config = config_of(YARN, original_max_position_embeddings=32)
    spec = read_spec(config.to_dict(), "config.json")
    expected = table_of_transformers(LlamaRotaryEmbedding(config), WINDOW)
    torch.testing.assert_close(rotary_table(spec.rope, WINDOW), expected, rtol=0, atol=1e-6)


def test_yarn_makes_the_window_as_long_as_it_is_for() -> None:
    """Files that turn it on by hand leave ``max_position_embeddings`` at the trained length."""
    by_hand = config_of({"rope_type": "yarn", "factor": 4.0}).to_dict()
    assert read_spec(by_hand, "").max_position_embeddings == 4 * WINDOW
    assert read_spec(config_of(YARN).to_dict(), "").max_position_embeddings == WINDOW


@pytest.mark.parametrize("is_long", [True, False], ids=["long", "short"])
def test_logits_of_a_long_rope_model(
    is_long: bool, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    """Every sequence is past the original window, or none may be."""
    original = 16 if is_long else 64
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    factors = {"short_factor": SHORT[:6], "long_factor": LONG[:6]}
    theirs = tiny_of(
        Phi3ForCausalLM,
        Phi3Config,
        original_max_position_embeddings=original,
        rope_parameters=rope | factors,
    )
    check = check_family(theirs, shortest=20 if is_long else 5)
    check.logits(ops, max_model_len=None if is_long else original)


@pytest.mark.native
def test_greedy_tokens_past_the_original_window(
    tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    rope = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    theirs = tiny_of(
        Phi3ForCausalLM,
        Phi3Config,
        original_max_position_embeddings=16,
        rope_parameters=rope | {"rope_theta": 10000.0},
    )
    check_family(theirs, shortest=20).greedy("cpu")


def test_dynamic_scaling_is_not_passed(
    tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    """Longer sequences than ``max_position_embeddings``, where it would set in, are refused."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = save(
        tiny_of(LlamaForCausalLM, LlamaConfig, max_position_embeddings=64, rope_parameters=rope)
    )
    with pytest.raises(ConfigError, match=r"128 is more than the model's window of 64"):
        build_core(EngineConfig.from_options({"model": str(folder), "max_model_len": 128}), 0)
