"""Log-probabilities of the offline LLM against transformers' log_softmax: drawn tokens and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.api import RequestOutput
from octavo.engine.errors import InvalidRequestError

Oracle = Callable[[list[int]], Any]
PROMPTS = [[(7 * i * i + 3 * i + k) % 250 for i in range(3 + 29 * k)] for k in range(5)]
DRAWN = SamplingParams(
    temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2
)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    """Token ids → ``[len, vocab]`` float32: row i has the log-probabilities of what follows token i."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def logprobs(token_ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)

    return logprobs


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), check_invariants=True, num_gpu_blocks_override=120) as llm:
        yield llm


def check_entries(entries: Any, token_ids: list[int], expected: Any, num_top: int) -> None:
    """``expected [num_tokens, vocab]`` are the log-probabilities at the tokens' positions."""
    assert len(entries) == len(token_ids)
    for entry, token_id, row in zip(entries, token_ids, expected, strict=True):
        first, *others = entry
        assert first == token_id
        assert num_top <= len(entry) <= num_top + 1
        for one, logprob in entry.items():
            assert abs(logprob.logprob - row[one].item()) < 1e-3
        assert entry[first].rank == 1 + int((row > row[first]).sum())
        wanted = set(row.topk(num_top).indices.tolist()) if num_top else set()
        assert wanted <= set(entry)
        assert [entry[one].logprob for one in others] == sorted(
            (entry[one].logprob for one in others), reverse=True
        )


def check(output: RequestOutput, oracle: Oracle, sampling: SamplingParams) -> None:
    prompt = output.prompt_token_ids
    for choice in output.outputs:
        table = oracle([*prompt, *choice.token_ids])
        at = table[len(prompt) - 1 : -1]
        if sampling.logprobs is not None:
            check_entries(choice.logprobs, choice.token_ids, at, sampling.logprobs)
            total = sum(
                entry[t].logprob
                for entry, t in zip(choice.logprobs or (), choice.token_ids, strict=True)
            )
            assert choice.cumulative_logprob == pytest.approx(total)
        else:
            assert choice.logprobs is None
        if sampling.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        before = table[: len(prompt) - 1]
        check_entries(output.prompt_logprobs[1:], prompt[1:], before, sampling.prompt_logprobs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"prompt_logprobs": None},
        {"logprobs": None},
        {"n": 3},
        {"temperature": 0.0, "presence_penalty": 2.0, "logit_bias": {5: 50.0}, "min_tokens": 3},
        {"n": 2, "best_of": 4},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.5},
    ],
)
def test_alone_and_in_a_batch(llm: LLM, oracle: Oracle, changes: dict[str, Any]) -> None:
    sampling = DRAWN.with_changes(**changes)
    for prompts in ([PROMPTS[3]], PROMPTS):
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            check(output, oracle, sampling)


def test_chunked_preempted_and_swapped(tiny_model: Path, oracle: Oracle) -> None:
    for options in (
        {"preemption_mode": "recompute"},
        {"swap_space": 0.01, "preemption_mode": "swap"},
    ):
        with LLM(
            str(tiny_model),
            check_invariants=True,
            num_gpu_blocks_override=13,
            max_num_batched_tokens=16,
            max_num_seqs=8,
            **options,
        ) as llm:
            sampling = DRAWN.with_changes(max_tokens=40)
            for output in llm.generate(PROMPTS, sampling, use_tqdm=False):
                check(output, oracle, sampling)
            assert llm.stats().num_preemptions > 0


def test_cached_prompts_are_scored_again_and_stay_findable(llm: LLM, oracle: Oracle) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()
    plain = DRAWN.with_changes(prompt_logprobs=None)
    (cold,) = llm.generate([PROMPTS[4]], DRAWN, use_tqdm=False)
    (warm,) = llm.generate([PROMPTS[4]], DRAWN, use_tqdm=False)
    (longer,) = llm.generate([[*PROMPTS[4][:64], 9, 8, 7]], DRAWN, use_tqdm=False)
    (after,) = llm.generate([PROMPTS[4]], plain, use_tqdm=False)
    for output in (cold, warm, longer):
        check(output, oracle, DRAWN)
        assert output.num_cached_tokens == 0
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert after.num_cached_tokens >= len(PROMPTS[4]) - 16
    asked = llm.stats().prefix_cache_queries - before.prefix_cache_queries
    assert asked == len(PROMPTS[4])  # of the one that looked


def test_only_the_prompt(llm: LLM, oracle: Oracle) -> None:
    sampling = DRAWN.with_changes(max_tokens=0, logprobs=None)
    for prompts, n in (([PROMPTS[2]], 1), (PROMPTS, 1), (PROMPTS, 2), ([[5]], 1)):
        outputs = llm.generate(prompts, sampling.with_changes(n=n), use_tqdm=False)
        for output in outputs:
            check(output, oracle, sampling)
            assert [(o.text, o.token_ids, o.finish_reason) for o in output.outputs] == [
                ("", [], "length")
            ] * n
    assert llm.stats().num_used_blocks == 0


def test_more_than_256_rows(llm: LLM, oracle: Oracle) -> None:
    prompt = [i * 31 % 256 for i in range(400)]
    sampling = DRAWN.with_changes(max_tokens=1)
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    check(output, oracle, sampling)


def test_a_row_that_is_not_finite_fails_alone(poisoned_model: Path) -> None:
    with LLM(str(poisoned_model), check_invariants=True, max_num_batched_tokens=8) as llm:
        good, bad, silent = llm.generate(
            [[1, 2, 3], [1, 2, 7, *([4] * 20)], [7] * 10],
            DRAWN.with_changes(max_tokens=0, logprobs=None),
            use_tqdm=False,
        )
        assert good.prompt_logprobs is not None
        for output in (bad, silent):
            assert [one.finish_reason for one in output.outputs] == ["error"]
            assert output.prompt_logprobs is None
        assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0, "prompt_logprobs": None}, "max_tokens"),
        ({"use_beam_search": True, "n": 2}, "prompt_logprobs"),
    ],
)
def test_wrong_values_are_refused_by_name(llm: LLM, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        llm.generate([[1, 2]], DRAWN.with_changes(**{"temperature": 0.0, **changes}))
    assert refusal.value.param == param


def test_the_whole_vocabulary_where_the_server_allows_it(tiny_model: Path, oracle: Oracle) -> None:
    with LLM(str(tiny_model), max_logprobs=-1) as llm:
        sampling = DRAWN.with_changes(logprobs=-1, prompt_logprobs=None, max_tokens=2)
        (output,) = llm.generate([PROMPTS[1]], sampling, use_tqdm=False)
    (choice,) = output.outputs
    table = oracle([*PROMPTS[1], *choice.token_ids])[len(PROMPTS[1]) - 1 : -1]
    check_entries(choice.logprobs, choice.token_ids, table, table.shape[1])


def test_decoded_tokens(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=2, logit_bias={256: 100.0}, ignore_eos=True, logprobs=20)
    (output,) = llm.generate(["a"], sampling, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for entry in output.outputs[0].logprobs or ():
        for token_id, one in entry.items():
            assert one.token_bytes == tokenizer.token_bytes(token_id)
            assert one.decoded_token == one.token_bytes.decode(errors="replace")
        assert entry[256].decoded_token == "<|end|>"


# --- named alternatives --------------------------------------------------------------------------


def test_named_tokens_stand_in_place_of_the_most_likely(llm: LLM, oracle: Oracle) -> None:
    named = (3, 200, 7, 3, *range(20, 60))
    asked = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprob_token_ids=named)
    plain = asked.with_changes(logprob_token_ids=(), logprobs=2)
    outputs = llm.generate([PROMPTS[0], PROMPTS[1]], [asked, plain], use_tqdm=False)
    (one,), prompt = outputs[0].outputs, PROMPTS[0]
    assert one.logprobs is not None
    rows = oracle(prompt + one.token_ids)[len(prompt) - 1 : -1]
    for entry, token_id, row in zip(one.logprobs, one.token_ids, rows, strict=True):
        assert set(entry) == {token_id, *named}
        for other, logprob in entry.items():
            assert abs(logprob.logprob - row[other].item()) < 1e-3
            assert logprob.rank == 1 + int((row > row[other]).sum())
    (beside,) = outputs[1].outputs
    assert beside.logprobs is not None
    assert all(len(entry) == 2 for entry in beside.logprobs)  # greedy: the first is among the two


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-1], "logprob_token_ids holds token id -1"),
        ([259], "logprob_token_ids holds token id 259"),
        (["a"], "logprob_token_ids must be an integer"),
        (list(range(129)), "at most 128"),
    ],
)
def test_names_that_are_no_tokens_are_refused(llm: LLM, ids: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", SamplingParams(logprob_token_ids=ids), use_tqdm=False)  # type: ignore[arg-type]


# --- beams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"logprob_token_ids": (5, 6)}, {"repetition_penalty": 1.5, "min_tokens": 4}]
)
def test_beams_tell_the_model_s_log_probabilities(
    llm: LLM, oracle: Oracle, tiny_model: Path, params: dict[str, Any]
) -> None:
    search = SamplingParams(use_beam_search=True, n=3, max_tokens=9, temperature=0.0, **params)
    told = search.with_changes(logprobs=2)
    without = llm.generate(PROMPTS[:3], search, use_tqdm=False)
    found = llm.generate(PROMPTS[:3], told, use_tqdm=False)
    for prompt, output, other in zip(PROMPTS[:3], found, without, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in other.outputs]
        for one, plain in zip(output.outputs, other.outputs, strict=True):
            assert plain.logprobs is None or params.get("logprob_token_ids")
            assert one.cumulative_logprob == plain.cumulative_logprob
            rows = oracle(prompt + one.token_ids)[len(prompt) - 1 : -1]
            if "logprob_token_ids" in params:
                assert one.logprobs is not None
                for entry, token_id, row in zip(one.logprobs, one.token_ids, rows, strict=True):
                    assert set(entry) == {token_id, 5, 6}
                    assert abs(entry[5].logprob - row[5].item()) < 1e-3
            else:
                check_entries(one.logprobs, one.token_ids, rows, 2)
            if not params:
                own = [
                    entry[i].logprob
                    for entry, i in zip(one.logprobs or (), one.token_ids, strict=True)
                ]
                assert one.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)
    with LLM(
        str(tiny_model), num_gpu_blocks_override=14, watermark=0.0, check_invariants=True
    ) as small:
        tight = small.generate(PROMPTS[:3], told, use_tqdm=False)
        assert small.stats().num_preemptions > 0
    for output, other in zip(found, tight, strict=True):
        for one, again in zip(output.outputs, other.outputs, strict=True):
            assert one.token_ids == again.token_ids
            assert [list(e) for e in one.logprobs or ()] == [list(e) for e in again.logprobs or ()]


def test_a_beam_s_prompt_has_no_log_probabilities() -> None:
    with pytest.raises(InvalidRequestError, match="prompt_logprobs cannot be had"):
        SamplingParams(use_beam_search=True, n=2, prompt_logprobs=1)
