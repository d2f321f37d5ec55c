"""Known faults C: what is drawn depends on the request alone, and every parameter does what it says."""

from __future__ import annotations

import concurrent.futures
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.execution.logit_rules import LogitRules, RuledRow, apply_rules

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
WORLD = 905  # " world"
PARIS = 7042  # " Paris"


def together(probe: Any, asks: list[dict[str, Any]]) -> list[str]:
    """Texts of completions that are sent at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(asks)) as threads:
        return list(threads.map(lambda ask: probe.text(**ask), asks))


def test_c01_a_seed_gives_one_text_in_any_company(exact: Any, pool: Any) -> None:
    ask = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1}
    seeded: dict[str, Any] = {**ask, "seed": 123}
    alone = exact.text(**seeded)
    crowd: list[dict[str, Any]] = [seeded] * 20 + [ask] * 7
    random.Random(1).shuffle(crowd)
    texts = together(exact, crowd)
    assert {t for t, one in zip(texts, crowd, strict=True) if "seed" in one} == {alone}
    unseeded = [t for t, one in zip(texts, crowd, strict=True) if "seed" not in one]
    assert len(set(unseeded)) == 7
    assert pool.text(**seeded) == alone  # another process, another pool, other chunks
    other_seeds = [0, -1, 124, 2**63 - 1, -(2**63)]
    others = together(exact, [{**ask, "seed": seed} for seed in other_seeds])
    assert len({alone, *others}) == 6
    for seed in (2**63, -(2**63) - 1, 1.5, "1", True):
        refused = exact.send(C, **{**ask, "seed": seed})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
    exact.canary()


def test_c03_two_starts_draw_different_texts_unless_the_operator_sets_a_seed(
    tiny_path: Path, start_server: Callable[..., Any]
) -> None:
    import httpx

    def first_text(*flags: str) -> str:
        body = {"prompt": "Once upon a time", "temperature": 1, "max_tokens": 24}
        with start_server(str(tiny_path), *flags) as server:
            answer = httpx.post(server.url + C, json=body, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    assert first_text() != first_text()
    assert first_text("--seed", "0") == first_text("--seed", "0")


def test_c03_the_random_state_of_a_script_is_left_alone(tiny_path: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24)

    def states() -> tuple[Any, ...]:
        numpy_state: Any = np.random.get_state()
        return random.getstate(), bytes(numpy_state[1]), bytes(torch.get_rng_state().numpy())

    def first_ids(**options: Any) -> tuple[int, ...]:
        random.seed(7)
        torch.manual_seed(7)
        with LLM(str(tiny_path), **options) as llm:
            before = states()
            (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
            assert states() == before
        return tuple(output.outputs[0].token_ids)

    assert len({first_ids() for _ in range(3)}) == 3
    assert len({first_ids(seed=0) for _ in range(3)}) == 1


def test_c06_top_k_past_the_vocabulary_is_off(exact: Any) -> None:
    ask: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8}
    counts = (-1, 0, 1, 49151, 49152, 49153, 9999999)
    asks = [{**ask, "temperature": 1, "top_k": count, "seed": 1} for count in counts]
    off, zero, one, _, *past = together(exact, asks)
    assert {off, zero, *past} == {off}
    assert one == exact.text(**ask) != off
    for count in (-2, 1.5, "1"):
        refused = exact.send(C, **ask, top_k=count)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_k")
    exact.canary()


@pytest.mark.parametrize(
    "bias",
    [
        {"49152": 5}, {"-1": 5}, {"abc": 5}, {"1e3": 5}, {" 7": 5}, {"+7": 5}, {"07": 5}, {"": 5},
        {"99999999999999999999": 5}, {"7": 101}, {"7": -101}, {"7": None}, {"7": "5"}, {"7": True},
        {"7": [1]}, [7], "7",
    ],
)  # fmt: skip
def test_c08_a_bias_outside_the_vocabulary_is_refused(exact: Any, bias: Any) -> None:
    for path in (C, X):
        refused = exact.send(path, max_tokens=4, logit_bias=bias)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logit_bias"
    exact.canary()


def test_c08_a_bias_forces_and_forbids(exact: Any) -> None:
    assert exact.text(prompt="hi", max_tokens=2, logit_bias={str(WORLD): 100}) == " world world"
    plain = exact.ask(C, prompt="hi", max_tokens=1, return_token_ids=True)["choices"][0]
    (first,) = plain["token_ids"]
    other = exact.text(prompt="hi", max_tokens=1, logit_bias={str(first): -100})
    assert other != plain["text"]
    exact.text(prompt="hi", max_tokens=1, logit_bias={"49151": 1, "0": -1})


def test_c10_penalties_equal_a_rule_in_numpy() -> None:
    rng = np.random.default_rng(10)
    prompt, output = [1, 2, 2, 3], [3, 4, 4]
    logits = rng.normal(0, 4, 8).astype(np.float32)
    for repetition, presence, frequency in ((2.0, 0, 0), (1.0, 2.0, 0), (1.0, 0, 2.0), (0.5, 1, 1)):
        expected = logits.astype(np.float64)
        for token in {*prompt, *output}:
            expected[token] *= repetition if expected[token] <= 0 else 1 / repetition
        for token in range(8):
            expected[token] -= presence * (token in output) + frequency * output.count(token)
        sampling = SamplingParams(
            repetition_penalty=repetition,
            presence_penalty=float(presence),
            frequency_penalty=float(frequency),
        )
        ids = [np.array(one, dtype=np.int32) for one in (prompt, output[:1])]
        rules = LogitRules(sampling, frozenset(), *ids)
        for token in output[1:]:
            rules.append(token)
        changed = torch.from_numpy(logits.copy()).unsqueeze(0)
        apply_rules(changed, [RuledRow(0, rules, 3)])
        np.testing.assert_allclose(changed[0].numpy(), expected, rtol=1e-5)


def test_c10_only_the_repetition_penalty_sees_the_prompt(exact: Any) -> None:
    """Between a token of the prompt, which leads by 1, and one that is not there."""
    ask: dict[str, Any] = {"prompt": "Paris Paris Paris Paris", "return_token_ids": True}

    def leads_by(token_id: int) -> float:
        body = {**ask, "allowed_token_ids": [token_id], "max_tokens": 1, "logprobs": 0}
        return float(exact.ask(C, **body)["choices"][0]["logprobs"]["token_logprobs"][0])

    ask["logit_bias"] = {str(WORLD): leads_by(PARIS) - leads_by(WORLD) - 1}
    ask["allowed_token_ids"] = [PARIS, WORLD]

    def ids(count: int, **fields: Any) -> list[int]:
        choice = exact.ask(C, **ask, max_tokens=count, **fields)["choices"][0]
        return list(choice["token_ids"])

    assert ids(1) == [PARIS]
    assert ids(1, presence_penalty=2) == ids(1, frequency_penalty=2) == [PARIS]
    assert ids(1, repetition_penalty=2) == [WORLD]
    assert ids(1, presence_penalty=-2, repetition_penalty=1.0) == [PARIS]
    assert ids(12, frequency_penalty=2) != ids(12)  # the output is seen


def test_c12_ignore_eos_ignores_every_end_id_of_the_model(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    folder = write_model(tmp_path / "m", eos=256, generation_eos=[257, 256])
    base = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(str(folder)) as llm:
        for end_id in (256, 257):
            bias = {end_id: 100.0}
            plain, ignoring, own = llm.generate(
                [[1, 2]] * 3,
                [
                    base.with_changes(logit_bias=bias, ignore_eos=False),
                    base.with_changes(logit_bias=bias),
                    base.with_changes(logit_bias=bias, stop_token_ids=(end_id,)),
                ],
                use_tqdm=False,
            )
            assert plain.outputs[0].token_ids == [end_id]
            assert ignoring.outputs[0].token_ids == [end_id] * 64
            assert ignoring.outputs[0].finish_reason == "length"
            assert own.outputs[0].token_ids == [end_id]
            assert (own.outputs[0].finish_reason, own.outputs[0].stop_reason) == ("stop", end_id)


def test_c12_over_http(exact: Any) -> None:
    ask: dict[str, Any] = {"prompt": "Hi", "ignore_eos": True, "logit_bias": {"2": 100}}
    ignoring = exact.ask(C, **ask, max_tokens=64)
    assert ignoring["usage"]["completion_tokens"] == 64
    assert ignoring["choices"][0]["finish_reason"] == "length"
    own = exact.ask(C, **ask, max_tokens=64, stop_token_ids=[2])
    assert own["usage"]["completion_tokens"] == 1
    assert (own["choices"][0]["finish_reason"], own["choices"][0]["stop_reason"]) == ("stop", 2)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (X, {"max_tokens": 8192}, "rest"),  # the whole window: cut to what is left
        (X, {"max_tokens": 8191}, "rest"),
        (X, {"max_tokens": None}, "rest"),
        (X, {}, "rest"),
        (X, {"max_completion_tokens": None, "max_tokens": None}, "rest"),
        (X, {"max_completion_tokens": 5, "max_tokens": 9}, 5),
        (X, {"max_completion_tokens": 9, "max_tokens": 5}, 9),
        (X, {"max_completion_tokens": 9, "max_tokens": 100000}, 9),
        (X, {"max_completion_tokens": None, "max_tokens": 7}, 7),
        (C, {}, 16),
        (C, {"max_tokens": None}, 16),
        (C, {"max_tokens": 8192}, "rest"),
        (C, {"max_tokens": 1}, 1),
    ],
)
def test_c15_lengths(exact: Any, path: str, fields: dict[str, Any], expected: Any) -> None:
    rendered = exact.ask(f"{path}/render", **fields)
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    rest = 8192 - len(rendered["token_ids"])
    limit = rest if expected == "rest" else expected
    assert rendered["sampling_params"]["max_tokens"] == limit
    ends_soon = {"logit_bias": {"2": 100}, "ignore_eos": limit < 20}
    answer = exact.ask(path, **fields, **ends_soon)
    assert answer["usage"]["completion_tokens"] == (limit if limit < 20 else 1)
    assert answer["choices"][0]["finish_reason"] == ("length" if limit < 20 else "stop")


@pytest.mark.parametrize("path", [C, X])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_c15_lengths_that_cannot_be_are_refused_with_the_cause(
    exact: Any, path: str, name: str
) -> None:
    num_prompt = exact.ask(path, max_tokens=1)["usage"]["prompt_tokens"]
    for value in (0, -1, 1.5, "9", True):
        error = exact.send(path, **{name: value}).json()["error"]
        assert error["param"] == name
    answer = exact.send(path, **{name: 100000})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert f"{name}=100000" in error["message"]
    assert {8192, 100000, num_prompt} <= set(map(int, re.findall(r"\d+", error["message"])))
    assert error["code"] == "context_length_exceeded"
    answer = exact.send(C, prompt=[WORLD] * 8192, **{name: 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert {8192} <= set(map(int, re.findall(r"\d+", error["message"])))
    exact.canary()


def plain_beams(
    logprobs_of: Any, prompt: list[int], width: int, length: int
) -> list[tuple[float, list[int]]]:
    """Beam search as it is written in books: the best continuations of all beams go on."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        found = []
        for score, output in beams:
            row = logprobs_of(prompt + output)[-1]
            values, ids = row.topk(2 * width)
            for value, token_id in zip(values.tolist(), ids.tolist(), strict=True):
                found.append((score + value, [*output, token_id]))
        beams = sorted(found, key=lambda one: -one[0])[:width]
        assert all(2 not in output for _, output in beams)  # no end id, so no rule for it
    return beams


def test_c16_beams_equal_a_plain_search(exact: Any, tokenizer: Any, logprobs_of: Any) -> None:
    ask: dict[str, Any] = {"prompt": "Deep learning is", "use_beam_search": True, "n": 4}
    answer = exact.ask(C, **ask, max_tokens=12, return_token_ids=True)
    expected = plain_beams(logprobs_of, tokenizer.encode("Deep learning is"), 4, 12)
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids for _, ids in expected]
    for choice, (score, ids) in zip(answer["choices"], expected, strict=True):
        assert choice["cumulative_logprob"] == pytest.approx(score, abs=1e-3)
        assert choice["text"] == tokenizer.decode(ids)
    refused = exact.send(C, **ask, best_of=3)  # narrower than what is asked for
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
    exact.audit()


def test_c17_stop_strings(exact: Any) -> None:
    ask: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}
    plain = exact.text(**ask)
    assert plain
    assert exact.text(**ask, stop=None) == exact.text(**ask, stop=[]) == plain
    for wrong in ("", [""], ["a", ""], ["x"] * 5, [1], 1, {"a": 1}, "a" * 10000, ["a" * 10000]):
        for path in (C, X):
            refused = exact.send(path, **{**ask, "stop": wrong, "prompt": "hi"})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith("stop")
    assert exact.text(**ask, stop=["a" * 1024, "b", "c" * 1000, "\u241f"]) is not None
    exact.canary()
