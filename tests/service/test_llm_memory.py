"""Sharing, as the offline ``LLM`` shows it: best_of, beams, cached prompts, snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, FinishReason, SamplingParams
from octavo.engine.errors import ConfigError, InvalidRequestError

DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
PROMPT = [(7 * i) % 250 for i in range(40)]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), check_invariants=True, num_gpu_blocks_override=40) as llm:
        yield llm
        assert llm.stats().num_used_blocks == 0


def generate(llm: LLM, prompts: Any, params: SamplingParams) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_best_of_returns_the_best_of_what_n_would_have_given(llm: LLM) -> None:
    (everything,) = generate(llm, [PROMPT], DRAWN.with_changes(n=5))
    (best,) = generate(llm, [PROMPT], DRAWN.with_changes(n=2, best_of=5))
    drawn = [output.token_ids for output in everything.outputs]
    first, second = best.outputs
    assert first.token_ids in drawn
    assert second.token_ids in drawn
    assert first.token_ids != second.token_ids
    assert [first.index, second.index] == [0, 1]
    assert 0 > first.cumulative_logprob >= second.cumulative_logprob
    assert best.num_discarded_tokens == 3 * 20


def test_best_of_ranks_by_the_mean_where_lengths_differ(llm: LLM) -> None:
    (everything,) = generate(llm, [PROMPT], DRAWN.with_changes(n=5))
    stop = everything.outputs[0].text[3:6]
    ranked = DRAWN.with_changes(n=5, best_of=6, stop=(stop,))
    (best,) = generate(llm, [PROMPT], ranked)
    means = [o.cumulative_logprob / len(o.token_ids) for o in best.outputs]
    assert means == sorted(means, reverse=True)
    assert {o.finish_reason for o in best.outputs} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_beam_search_gives_prompt_and_continuation(llm: LLM) -> None:
    (by_ids,) = llm.beam_search([PROMPT], BEAMS)
    assert len(by_ids.sequences) == 3
    scores = [sequence.cum_logprob for sequence in by_ids.sequences]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    for sequence in by_ids.sequences:
        assert sequence.tokens[: len(PROMPT)] == PROMPT
        assert len(sequence.tokens) == len(PROMPT) + 12
    text = llm.get_tokenizer().decode(PROMPT)
    assert by_ids.sequences[0].text.startswith(text)
    assert llm.beam_search({"prompt_token_ids": PROMPT}, BEAMS) == [by_ids]


def test_generate_searches_too(llm: LLM) -> None:
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=12, ignore_eos=True)
    (generated,) = generate(llm, [PROMPT], params)
    (searched,) = llm.beam_search([PROMPT], BEAMS)
    assert [PROMPT + o.token_ids for o in generated.outputs] == [
        sequence.tokens for sequence in searched.sequences
    ]
    assert [o.cumulative_logprob for o in generated.outputs] == [
        sequence.cum_logprob for sequence in searched.sequences
    ]


def test_a_beam_search_of_one_is_greedy(llm: LLM) -> None:
    (search,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=1, max_tokens=12))
    (greedy,) = generate(llm, [PROMPT], SamplingParams(temperature=0.0, max_tokens=12))
    assert search.sequences[0].tokens == PROMPT + greedy.outputs[0].token_ids


def test_wrong_beam_parameters_are_refused_by_name(llm: LLM) -> None:
    for wrong, param in (
        ({"beam_width": 0}, "beam_width"),
        ({"temperature": 0.5}, "temperature"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError) as refusal:
            llm.beam_search(["a"], params)
        assert refusal.value.param == param


def test_cached_tokens_are_told_and_forgotten(llm: LLM) -> None:
    def num_cached() -> int:
        return int(generate(llm, [PROMPT], DRAWN)[0].num_cached_tokens)

    assert num_cached() == 0
    assert 32 <= num_cached() < 40
    llm.reset_prefix_cache()
    assert num_cached() == 0


def test_a_salt_keeps_tenants_apart(llm: LLM) -> None:
    def num_cached(**salt: str) -> int:
        prompt = {"prompt_token_ids": PROMPT, **salt}
        return int(generate(llm, prompt, DRAWN)[0].num_cached_tokens)

    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="b") == 0
    assert num_cached() == 0
    assert num_cached(cache_salt="a") >= 32
    wrongs: list[Any] = ["", "a/b", 5]
    for wrong in wrongs:
        with pytest.raises(InvalidRequestError) as refusal:
            num_cached(cache_salt=wrong)
        assert refusal.value.param == "cache_salt"


def test_hits_and_copies_change_no_output(llm: LLM, tiny_model: Path) -> None:
    prompts = [PROMPT[: 20 + i] for i in range(12)]
    with LLM(str(tiny_model), enable_prefix_caching=False) as plain:
        expected = [o.outputs[0].token_ids for p in prompts for o in generate(plain, [p], DRAWN)]
        assert plain.stats().prefix_cache_hits == 0
    for _ in range(2):
        outputs = generate(llm, prompts, DRAWN)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert llm.stats().prefix_cache_hits > 0


def test_snapshot_of_an_idle_engine(llm: LLM) -> None:
    generate(llm, [PROMPT], DRAWN)
    snapshot = llm.kv_snapshot()
    assert (snapshot.num_blocks, len(snapshot.blocks), snapshot.sequences) == (40, 40, ())
    assert all(not block.ref_count and not block.seq_ids for block in snapshot.blocks)
    num_cached = sum(block.is_cached for block in snapshot.blocks)
    assert num_cached == llm.stats().num_cached_blocks >= 40 // 16


def test_nothing_is_asked_of_a_closed_one(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), num_gpu_blocks_override=40)
    llm.close()
    for ask in (llm.kv_snapshot, llm.reset_prefix_cache):
        with pytest.raises(ConfigError, match="closed"):
            ask()
