from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, FinishReason, PoolingParams, SamplingParams
from octavo.engine.errors import ConfigError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), check_invariants=True, num_gpu_blocks_override=40) as llm:
        yield llm


def test_order_is_kept_and_every_form_of_prompt_works(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    forms: list[Any] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, "other"]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts[0] == texts[1] == texts[2] == texts[3] != texts[4]
    assert outputs[0].prompt == "hello"
    assert outputs[1].prompt is None
    assert outputs[1].prompt_token_ids == ids
    assert all(output.finished for output in outputs)
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    (by_text,) = llm.generate("hello", GREEDY, use_tqdm=False)
    (by_ids,) = llm.generate(llm.get_tokenizer().encode("hello"), GREEDY, use_tqdm=False)
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=1) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequestError, match="3 prompts and 2"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, [GREEDY, None], 3, PoolingParams()])
def test_parameters_of_another_kind_are_refused_by_name(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="pooling_params must be PoolingParams"):
        llm.embed(["a", "b"], pooling_params=GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_a_small_pool_changes_no_output(llm: LLM, tiny_model: Path) -> None:
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(12)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    roomy = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(
        str(tiny_model),
        num_gpu_blocks_override=9,
        max_num_batched_tokens=16,
        watermark=0.0,
        check_invariants=True,
    ) as small:
        tight = [o.outputs[0].token_ids for o in small.generate(prompts, params, use_tqdm=False)]
        assert small.stats().num_preemptions > 0
    assert tight == roomy


def test_a_seeded_sample_is_the_same_in_any_company(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    (alone,) = llm.generate("some prompt", seeded, use_tqdm=False)
    others = [f"prompt {i}" * (i + 1) for i in range(6)]
    params = [seeded, *[seeded.with_changes(seed=None, max_tokens=5 + i) for i in range(6)]]
    crowd = llm.generate(["some prompt", *others], params, use_tqdm=False)
    assert crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("length", [15, 16, 17, 23, 31, 32])
@pytest.mark.parametrize("params", [{}, {"presence_penalty": 2.0, "min_tokens": 5}])
def test_n_children_equal_n_single_runs_with_their_seeds(
    llm: LLM, length: int, params: dict[str, Any]
) -> None:
    prompt = [(7 * i) % 250 for i in range(length)]
    common = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, **params)
    seeds = [common.with_changes(seed=3 + i) for i in range(4)]
    singles = llm.generate([prompt] * 4, seeds, use_tqdm=False)
    before = llm.stats()
    (forked,) = llm.generate([prompt], common.with_changes(seed=3, n=4), use_tqdm=False)
    assert [o.index for o in forked.outputs] == [0, 1, 2, 3]
    assert [o.token_ids for o in forked.outputs] == [s.outputs[0].token_ids for s in singles]
    assert llm.stats().num_prompt_tokens - before.num_prompt_tokens == length


def test_children_survive_preemption_chunks_and_each_other_s_stops(
    llm: LLM, tiny_model: Path
) -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=30, ignore_eos=True)
    prompts = [[(i * j) % 250 for i in range(1, 20 + j)] for j in range(1, 7)]
    roomy = llm.generate(prompts, params, use_tqdm=False)
    with LLM(
        str(tiny_model),
        num_gpu_blocks_override=14,
        max_num_batched_tokens=8,
        watermark=0.0,
        check_invariants=True,
    ) as small:
        tight = small.generate(prompts, params, use_tqdm=False)
        assert small.stats().num_preemptions > 0
    for wide, narrow in zip(roomy, tight, strict=True):
        assert [o.token_ids for o in wide.outputs] == [o.token_ids for o in narrow.outputs]
    first = roomy[0].outputs[1]
    stop = first.text[8:11]
    (stopped,) = llm.generate([prompts[0]], params.with_changes(stop=(stop,)), use_tqdm=False)
    for index, output in enumerate(stopped.outputs):
        whole = roomy[0].outputs[index].text
        assert output.text == whole.split(stop)[0]
        assert output.finish_reason is (FinishReason.STOP if stop in whole else FinishReason.LENGTH)
    assert llm.stats().num_used_blocks == 0


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(one, GREEDY, use_tqdm=False)
    first, second = llm.chat([one, one], GREEDY, use_tqdm=False)
    assert single.prompt == "<|start|>user: hi<|stop|><|start|>assistant: "
    assert single.outputs[0].text == first.outputs[0].text == second.outputs[0].text


def test_wrong_prompts_compute_nothing(llm: LLM) -> None:
    before = llm.stats().num_steps
    wrongs: list[Any] = ["", [[]], ["fine", {"x": 1}], [300], [["a"]]]
    for wrong in wrongs:
        with pytest.raises(InvalidRequestError):
            llm.generate(wrong, GREEDY)
    assert llm.stats().num_steps == before
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_default_parameters_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()


def test_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    assert "3/3" in capsys.readouterr().err


def test_progress_bar_of_a_failure_does_not_jump_to_its_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_step() -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(llm._engine._core, "step", failing_step)
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate(["a", "b", "c"], GREEDY)
    assert "0/3" in (shown := capsys.readouterr().err)
    assert "3/3" not in shown


def test_interrupt_ends_the_batch_and_leaves_the_engine_usable(llm: LLM) -> None:
    (before,) = llm.generate("hello", GREEDY, use_tqdm=False)
    long = SamplingParams(max_tokens=500, ignore_eos=True)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 400, long, use_tqdm=False)
    timer.join()
    assert llm.stats().num_used_blocks == 0
    (after,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_an_interrupted_step_is_not_lost_to_queued_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = llm.generate("queued", GREEDY, use_tqdm=False)
    llm.enqueue("queued", GREEDY)
    step, num_steps = llm._engine._core.step, 0

    def interrupted_step() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._engine._core, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", GREEDY, use_tqdm=False)
    (queued,) = llm.wait_for_completion(use_tqdm=False)
    assert queued.outputs[0].token_ids == alone.outputs[0].token_ids


def test_threads_take_turns_at_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = llm.generate("one", GREEDY, use_tqdm=False)
    core, num_inside, most_inside = llm._engine._core, 0, 0
    step = core.step

    def slow_step() -> Any:
        nonlocal num_inside, most_inside
        num_inside += 1
        most_inside = max(most_inside, num_inside)
        time.sleep(0.01)  # the other threads' turn, if they take one
        try:
            return step()
        finally:
            num_inside -= 1

    def work(number: int) -> Any:
        if number % 2:
            return llm.embed("one", use_tqdm=False)[0].outputs.embedding
        return llm.generate("one", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    embedding = work(1)
    monkeypatch.setattr(core, "step", slow_step)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(work, range(4)))
    assert answers == [alone.outputs[0].token_ids, embedding] * 2
    assert most_inside == 1
    assert not llm.kv_snapshot().sequences


def test_closing_ends_what_other_threads_compute(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model))
    has_begun = threading.Event()
    core, step = llm._engine._core, llm._engine._core.step

    def told_step() -> Any:
        has_begun.set()
        return step()

    core.step = told_step  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        answer = threads.submit(llm.generate, ["a"] * 4, endless, use_tqdm=False)
        assert has_begun.wait(20)
        llm.close()
        with pytest.raises(ConfigError, match="closed"):
            answer.result(20)


def test_nonfinite_logits_end_their_own_request_only(poisoned_model: Path) -> None:
    with LLM(str(poisoned_model), check_invariants=True) as llm:
        good = list(range(20, 40))
        (alone,) = llm.generate(good, GREEDY, use_tqdm=False)
        bad, beside = llm.generate([[7, 8, 9], good], GREEDY, use_tqdm=False)
        assert bad.outputs[0].finish_reason is FinishReason.ERROR
        assert bad.error is not None
        assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
        (later,) = llm.generate(good, GREEDY, use_tqdm=False)
        assert later.outputs[0].token_ids == alone.outputs[0].token_ids
        assert llm.stats().num_nonfinite_rows == 1


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"max_model_len": 513}, "--max-model-len"),
        ({"max_model_len": 400, "num_gpu_blocks_override": 4}, "--max-model-len"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-seqs"),
        ({"block_size": 0}, "--block-size"),
        ({"dtype": "float16"}, "--dtype"),
        ({"device": "cuda"}, "--device"),
        ({"attention_backend": "magic"}, "--attention-backend"),
        ({"no_such_option": 1}, "--no-such-option"),
    ],
)
def test_wrong_options_are_refused_by_flag(
    tiny_model: Path, options: dict[str, object], flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        LLM(str(tiny_model), **options)


def test_unset_window_shrinks_to_the_pool(tiny_model: Path) -> None:
    with LLM(str(tiny_model), num_gpu_blocks_override=4) as llm:
        (output,) = llm.generate(
            "x" * 60, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(InvalidRequestError, match="64 tokens"):
            llm.generate("x" * 64, GREEDY, use_tqdm=False)


def test_close_twice_and_no_use_after(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model))
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")


def test_llm_needs_no_web_libraries() -> None:
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'msgspec','zmq','fastapi','uvicorn','prometheus_client','setproctitle',
                                  'pydantic','sse_starlette','starlette'}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from octavo import LLM
import octavo.engine.execution.runner, octavo.engine.models.loader
print(LLM.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "LLM", done.stderr
