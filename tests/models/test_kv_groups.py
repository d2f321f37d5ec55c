"""Models with windowed and full layers through the whole engine: tiny pools, prefix hits, preemption, swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from octavo.engine.api import SamplingParams
from octavo.engine.checkpoint.kv_groups import kv_groups
from octavo.engine.checkpoint.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.engine.errors import ConfigError
from octavo.engine.llm import LLM

WINDOW = 10
S, F = "sliding_attention", "full_attention"
LAYERS = {
    "one-to-one": [S, F],
    "two-to-one": [S, S, F, S, S, F],
    "padded": [S, F, S, F, S, S, F],
}


def tiny(tiny_of: Callable[..., Any], layers: Sequence[str]) -> Any:
    sizes = {"num_hidden_layers": len(layers), "max_position_embeddings": 512}
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": list(layers)}
    return tiny_of(Qwen2ForCausalLM, Qwen2Config, **sizes, **windows)


class Engine:
    """One engine over the folder of a transformers model; invariants are checked after each step."""

    def __init__(self, theirs: Any, folder: Path, **options: Any) -> None:
        self.theirs = theirs
        sizes = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 6}
        self.llm = LLM(
            str(folder),
            dtype="float32",
            check_invariants=True,
            **(sizes | options),
        )

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> list[Any]:
        params = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            **({"temperature": 0} | sampling),
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        return [[list(one.token_ids) for one in output.outputs] for output in outputs]

    def expected(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids.append(int(self.theirs(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture
def make_engine(
    tmp_path: Path, write_tokenizer: Callable[[Path], None]
) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(theirs: Any, **options: Any) -> Engine:
        theirs.save_pretrained(tmp_path)
        write_tokenizer(tmp_path)
        engines.append(Engine(theirs, tmp_path, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm.close()


def random_prompts(lengths: Sequence[int], num_common: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    common = torch.randint(3, 90, (num_common,), generator=random).tolist()
    rest = [torch.randint(3, 90, (n,), generator=random).tolist() for n in lengths]
    return [common + tokens for tokens in rest]


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_tokens_are_transformers_in_a_tiny_pool(
    make_engine: Callable[..., Engine], tiny_of: Callable[..., Any], layers: list[str], mode: str
) -> None:
    theirs = tiny(tiny_of, layers)
    engine = make_engine(
        theirs,
        num_gpu_blocks_override=60 * len(set(layers)),
        swap_space=0.01 if mode == "swap" else 0,
        preemption_mode=mode,
    )
    prompts = random_prompts([70, 33, 5, 50], 41)
    expected = [[engine.expected(prompt, 60)] for prompt in prompts]
    assert engine.run(prompts, 60) == expected
    turns = [prompt + tokens[:21] for prompt, (tokens,) in zip(prompts, expected, strict=True)]
    assert engine.run(turns, 39) == [[tokens[21:]] for (tokens,) in expected]
    assert engine.run(prompts[:1], 60) == expected[:1]
    stats = engine.llm.stats()
    assert stats.num_preemptions > 0
    assert (
        (stats.num_preemptions_by_swap > 0) == (stats.num_blocks_swapped_in > 0) == (mode == "swap")
    )
    assert stats.prefix_cache_hits >= 40


@pytest.mark.parametrize("beams", [False, True])
def test_samples_and_beams_are_those_of_a_large_pool(
    make_engine: Callable[..., Engine], tiny_of: Callable[..., Any], beams: bool
) -> None:
    theirs = tiny(tiny_of, LAYERS["two-to-one"])
    wide = {"use_beam_search": True, "n": 3} if beams else {"temperature": 1.0, "seed": 3, "n": 3}
    prompts = random_prompts([37, 20, 3], 21)
    large = make_engine(theirs, num_gpu_blocks_override=1000)
    expected = large.run(prompts, 45, **wide)
    assert large.llm.stats().num_preemptions == 0
    small = make_engine(
        theirs,
        num_gpu_blocks_override=110,
        max_num_batched_tokens=13,
        max_num_seqs=9,
        swap_space=0.01,
        preemption_mode="swap",
    )
    assert small.run(prompts, 45, **wide) == expected
    assert small.llm.stats().num_preemptions > 0 or beams  # which share nearly everything
    assert small.llm.stats().num_block_copies > 0


def test_lengths_that_fit_count_a_windows_blocks_only(
    make_engine: Callable[..., Engine], tiny_of: Callable[..., Any]
) -> None:
    """Of 60 blocks, two windowed groups have 3 + 4 + 2 each at most: 42 are left to the full one."""
    theirs = tiny(tiny_of, LAYERS["two-to-one"])
    engine = make_engine(theirs, num_gpu_blocks_override=60)
    info = engine.llm._info
    assert (info.max_model_len, info.num_kv_tokens, info.kv_concurrency) == (168, 168, 1.0)
    assert info.kv_windows == (None, WINDOW, WINDOW)
    ((tokens,),) = engine.run([[5] * 100], 68)
    assert len(tokens) == 68
    assert engine.llm.stats().num_preemptions == 0
    with pytest.raises(ConfigError, match="holds 168 tokens"):
        make_engine(theirs, num_gpu_blocks_override=60, max_model_len=169)
    with pytest.raises(ConfigError, match="fewer blocks than the model has KV groups"):
        make_engine(theirs, num_gpu_blocks_override=2)


def test_groups_of_known_models() -> None:
    def sizes(num_windowed: int, num_full: int, window: int, longest: int) -> list[tuple[Any, int]]:
        spec = spec_of(num_windowed, num_full, window, longest)
        groups = kv_groups(spec)
        assert sorted(layer for group in groups for layer in group.layers) == list(
            range(spec.num_layers)
        )
        return [(group.window, len(group.layers)) for group in groups]

    assert sizes(15, 3, 512, 32768) == [(None, 3)] + [(512, 3)] * 5  # Gemma 3 270M
    assert sizes(22, 4, 512, 32768) == [(None, 4)] + [(512, 4)] * 5 + [(512, 2)]  # 1B
    assert sizes(13, 13, 4096, 8192) == [(None, 13), (4096, 13)]  # Gemma 2 2B
    assert sizes(0, 9, 4096, 8192) == [(None, 9)]
    assert sizes(9, 0, 4096, 8192) == [(4096, 9)]
    assert sizes(5, 1, 64, 8192) == [(None, 1)] + [(64, 1)] * 5


def spec_of(num_windowed: int, num_full: int, window: int, longest: int) -> ModelSpec:
    rope = RopeSpec(1e4, 4)
    layers = [LayerSpec(rope, window)] * num_windowed + [LayerSpec(rope, None)] * num_full
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        vocab_size=8,
        hidden_size=4,
        num_layers=len(layers),
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=4,
        rms_norm_eps=1e-6,
        rope=rope,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        sliding_window=None,
        dtype="float32",
        layers=tuple(layers),
    )


@pytest.mark.parametrize(
    "backend", ["reference", "torch", pytest.param("cpu", marks=pytest.mark.native)]
)
@pytest.mark.parametrize("kind", ["two groups", "one group"])
def test_what_fell_out_of_a_window_is_never_read(
    make_engine: Callable[..., Engine], tiny_of: Callable[..., Any], backend: str, kind: str
) -> None:
    """After each step, all blocks that nobody has are filled with NaN."""
    if kind == "one group":
        sizes = {"sliding_window": WINDOW, "max_position_embeddings": 512}
        theirs = tiny_of(MistralForCausalLM, MistralConfig, **sizes)
    else:
        theirs = tiny(tiny_of, LAYERS["two-to-one"])
    engine = make_engine(
        theirs,
        num_gpu_blocks_override=100,
        attention_backend=backend,
        enable_prefix_caching=False,
        max_num_batched_tokens=23,
    )
    core: Any = engine.llm._engine._core
    step, pool, caches = core.step, core._scheduler.memory.pool, core._executor._kv_caches
    most_used = 0

    def poisoned_step() -> Any:
        nonlocal most_used
        output = step()
        most_used = max(most_used, pool.num_used_blocks)
        for cache in caches:
            for tensor in cache:
                tensor[pool.free_block_ids] = float("nan")
        return output

    core.step = poisoned_step
    prompts = random_prompts([60, 1, 30], 0)
    expected = [[engine.expected(prompt, 30)] for prompt in prompts]
    assert engine.run(prompts, 30) == expected
    held = -(-(WINDOW + 23) // 4) + 2
    if kind == "one group":
        assert most_used <= 3 * held
