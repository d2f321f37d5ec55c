"""``LLM.embed`` against transformers' last hidden states: every op set, any chunks, any company."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, EmbeddingRequestOutput, PoolingParams, SamplingParams
from octavo.engine.api import GenerationRequest, TokensPrompt
from octavo.engine.errors import ConfigError, InvalidRequestError

Oracle = Callable[[Sequence[int], PoolingParams], Any]
PROMPTS = [[(7 * i * i + 3 * i + k) % 250 for i in range(3 + 29 * k)] for k in range(5)]
LAST, MEAN = PoolingParams("last"), PoolingParams("mean")
KINDS = [
    LAST,
    MEAN,
    PoolingParams("last", normalize=False),
    PoolingParams("mean", normalize=False),
    PoolingParams("last", 7),
    PoolingParams("mean", 31),
    PoolingParams("mean", 1, normalize=False),
]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    """The embedding made of transformers' last hidden states, in float64."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model, dtype=torch.float32)

    def embedding(token_ids: Sequence[int], pooling: PoolingParams) -> Any:
        with torch.inference_mode():
            states = model(torch.tensor([list(token_ids)])).last_hidden_state[0].double()
        vector = states[-1] if pooling.pooling_type == "last" else states.mean(dim=0)
        vector = vector[: pooling.dimensions]
        return (vector / vector.norm() if pooling.normalize else vector).numpy()

    return embedding


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), check_invariants=True, num_gpu_blocks_override=120) as llm:
        yield llm


def check(output: EmbeddingRequestOutput, oracle: Oracle, pooling: PoolingParams) -> None:
    found, wanted = (
        np.array(output.outputs.embedding),
        oracle(output.prompt_token_ids, pooling),
    )
    assert output.error is None
    assert output.finished
    assert found.shape == wanted.shape == (output.outputs.hidden_size,)
    assert np.abs(found - wanted).max() < 1e-3
    if pooling.normalize:
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)
    cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert cosine > 1 - 1e-4


def embeddings(outputs: Sequence[EmbeddingRequestOutput]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize(
    "backend", [pytest.param("cpu", marks=pytest.mark.native), "torch", "reference"]
)
def test_every_op_set_alone_in_a_batch_and_in_chunks(
    tiny_model: Path, oracle: Oracle, backend: str
) -> None:
    for budget in (None, 16):
        with LLM(
            str(tiny_model),
            attention_backend=backend,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            enable_prefix_caching=False,
            check_invariants=True,
        ) as llm:
            for pooling in KINDS:
                for prompts in ([PROMPTS[3]], PROMPTS):
                    outputs = llm.embed(prompts, pooling_params=pooling, use_tqdm=False)
                    assert [output.prompt_token_ids for output in outputs] == prompts
                    for output in outputs:
                        check(output, oracle, pooling)
            assert llm.stats().num_used_blocks == 0


@pytest.mark.native
@pytest.mark.parametrize("pooling", [LAST, MEAN])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_same_bits_in_any_company(tiny_model: Path, pooling: PoolingParams, mode: str) -> None:
    """Chunked, cached, preempted and beside generation."""
    with LLM(str(tiny_model), attention_backend="cpu", enable_prefix_caching=False) as llm:
        alone = [llm.embed(p, pooling_params=pooling, use_tqdm=False)[0] for p in PROMPTS]
        generated = llm.generate([[9, k] for k in range(4)], long_output(60), use_tqdm=False)
    expected = embeddings(alone)
    with LLM(
        str(tiny_model),
        attention_backend="cpu",
        check_invariants=True,
        num_gpu_blocks_override=13,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        watermark=0.0,
        preemption_mode=mode,
        swap_space=0.01,
    ) as llm:
        num_preemptions = 0
        for _ in range(2):  # the second time prefixes are cached
            requests = [generation(f"g{k}", [9, k], 60) for k in range(4)]
            requests += [embedding(f"e{k}", PROMPTS[k], pooling) for k in (4, 3, 2, 1, 0)]
            outputs = llm._engine.run(llm._engine.submit(requests, llm._admission), use_tqdm=False)
            packed = [output.embedding or b"" for output in outputs[:3:-1]]
            assert [np.frombuffer(one, "<f4").tolist() for one in packed] == expected
            for one, other in zip(outputs, generated, strict=False):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
            num_preemptions += sum(
                one.metrics.num_preemptions for one in outputs[4:] if one.metrics
            )
        assert num_preemptions > 0


def long_output(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def generation(request_id: str, token_ids: list[int], max_tokens: int) -> GenerationRequest:
    sampling = long_output(max_tokens)
    return GenerationRequest(request_id, TokensPrompt(token_ids), sampling, time.monotonic())


def embedding(request_id: str, token_ids: list[int], pooling: PoolingParams) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        TokensPrompt(token_ids),
        SamplingParams(max_tokens=0),
        time.monotonic(),
        pooling=pooling,
    )


def test_cached_prefixes(llm: LLM, oracle: Oracle) -> None:
    llm.reset_prefix_cache()
    prompt = PROMPTS[4][:96]
    for pooling, num_cached in ((MEAN, 0), (LAST, 95), (MEAN, 0), (LAST, 95)):
        (output,) = llm.embed(prompt, pooling_params=pooling, use_tqdm=False)
        check(output, oracle, pooling)
        assert output.num_cached_tokens == num_cached
    salted: dict[str, Any] = {"prompt_token_ids": prompt, "cache_salt": "a"}
    (output,) = llm.embed(salted, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_forms_of_prompts_and_parameters(llm: LLM, oracle: Oracle) -> None:
    ids = llm.get_tokenizer().encode("some text")
    (as_text,) = llm.embed("some text", use_tqdm=False)
    (as_ids,) = llm.embed(ids, use_tqdm=False)
    mixed: list[Any] = ["some text", ids, {"prompt": "some text"}, {"prompt_token_ids": ids}]
    kinds = [LAST, MEAN, PoolingParams(), PoolingParams("mean", 5)]
    outputs = llm.embed(mixed, pooling_params=kinds, use_tqdm=False)
    assert as_text.outputs.embedding == as_ids.outputs.embedding
    for output, kind in zip(outputs, [LAST, MEAN, LAST, kinds[3]], strict=True):
        assert output.prompt_token_ids == ids
        check(output, oracle, kind)
    assert llm.embed([], use_tqdm=False) == []


def test_the_engine_s_own_kind_of_pooling(tiny_model: Path, oracle: Oracle) -> None:
    with LLM(str(tiny_model), pooling_type="mean") as llm:
        default, last = llm.embed([PROMPTS[1]] * 2, pooling_params=[PoolingParams(), LAST])
        check(default, oracle, MEAN)
        check(last, oracle, LAST)
    with pytest.raises(ConfigError, match="--pooling-type"):
        LLM(str(tiny_model), pooling_type="cls")


def test_truncated_prompts_and_the_whole_window(llm: LLM, oracle: Oracle) -> None:
    window = [i * 31 % 256 for i in range(512)]
    for prompt, limit, wanted in (
        (window, None, window),
        ([5, *window], -1, window),
        (PROMPTS[2], 10, PROMPTS[2][-10:]),
        (PROMPTS[2], -1, PROMPTS[2]),
    ):
        (output,) = llm.embed(
            prompt, pooling_params=MEAN, truncate_prompt_tokens=limit, use_tqdm=False
        )
        assert output.prompt_token_ids == wanted
        check(output, oracle, MEAN)


def test_a_prompt_that_is_not_finite_fails_alone(poisoned_model: Path) -> None:
    for pooling in (LAST, MEAN):
        with LLM(str(poisoned_model), check_invariants=True, max_num_batched_tokens=8) as llm:
            good, bad = llm.embed(
                [[1, 2, 3], [1, 2, 7, *([4] * 20)]], pooling_params=pooling, use_tqdm=False
            )
            assert (good.error, good.outputs.hidden_size) == (None, 32)
            assert bad.error is not None
            assert "not finite" in bad.error
            assert bad.outputs.embedding == []
            assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("prompt", "pooling", "param"),
    [
        ([1] * 513, {}, "input"),
        ("", {}, "input"),
        ([259], {}, "input"),
        ([-1], {}, "input"),
        ([1], {"dimensions": 33}, "dimensions"),
        ([1], {"dimensions": 0}, "dimensions"),
        ([1], {"dimensions": 2.5}, "dimensions"),
        ([1], {"pooling_type": "cls"}, "pooling_type"),
        ([1], {"normalize": 1}, "normalize"),
    ],
)
def test_wrong_requests_are_refused_by_name(
    llm: LLM, prompt: Any, pooling: dict[str, Any], param: str
) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError) as refusal:
        llm.embed([[1, 2], prompt], pooling_params=PoolingParams(**pooling), use_tqdm=False)
    assert refusal.value.param == param
    assert llm.stats().num_steps == steps


def test_wrong_lengths_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 pooling_params") as refusal:
        llm.embed([[1], [2]], pooling_params=[LAST], use_tqdm=False)
    assert refusal.value.param == "pooling_params"
    for limit in (0, 513, -2):
        with pytest.raises(InvalidRequestError) as refusal:
            llm.embed([[1]], truncate_prompt_tokens=limit, use_tqdm=False)
        assert refusal.value.param == "truncate_prompt_tokens"
