"""Scripts written for another engine's ``LLM`` run when only their import is changed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, FinishReason, SamplingParams
from octavo.engine.errors import ConfigError, InvalidRequestError, NotSupportedError
from octavo.engine.service.offline_params import SamplingType

SCRIPTS = Path(__file__).parent / "scripts"


def run(name: str, model: Path) -> Any:
    """What a script leaves as RESULT."""
    source = (SCRIPTS / f"{name}.txt").read_text()
    changed = source.replace("from vllm import", "from octavo import")
    assert changed.count("octavo") == source.count("vllm import") == 1
    names: dict[str, Any] = {"MODEL": str(model)}
    exec(compile(changed, f"{name}.txt", "exec"), names)
    return names["RESULT"]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Any:
    with LLM(str(tiny_model), num_gpu_blocks_override=60, check_invariants=True) as llm:
        yield llm


def test_basic(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, outputs = run("basic", tiny_model)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished for output in outputs)
    assert capsys.readouterr().out.count("Output: ") == 4


def test_chat(tiny_model: Path) -> None:
    one, many, other, by_text, tokenizer = run("chat", tiny_model)
    assert "user: Hello<|stop|>" in one.prompt
    assert [o.outputs[0].token_ids for o in many] == [one.outputs[0].token_ids] * 3
    assert other.prompt.startswith("[system] You are a helpful assistant\n[user] Hello\n")
    assert by_text.prompt_token_ids == one.prompt_token_ids
    assert by_text.outputs[0].token_ids == one.outputs[0].token_ids
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token_id == tokenizer.encode("<|end|>")[0]
    assert tokenizer.decode(tokenizer.encode("a<|end|>")) == "a<|end|>"


def test_logprobs(tiny_model: Path) -> None:
    outputs, rows, scored = run("logprobs", tiny_model)
    assert [len(o.prompt_logprobs) for o in outputs] == [len(o.prompt_token_ids) for o in outputs]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert all(logprob <= 0 and rank >= 1 for _, logprob, rank, _ in rows)
    assert all(len(entry) == 1 for entry in scored[0].prompt_logprobs[1:])


def test_beam_search(tiny_model: Path) -> None:
    outputs, tokenizer = run("beams", tiny_model)
    for output, prompt in zip(outputs, ([*b"Deep learning is"], [9, 8, 7]), strict=True):
        assert len(output.sequences) == 3
        for one in output.sequences:
            generated = one.tokens[len(prompt) :]
            assert len(generated) == len(one.logprobs) == 7
            own = [entry[i].logprob for entry, i in zip(one.logprobs, generated, strict=True)]
            assert one.cum_logprob == pytest.approx(math.fsum(own), abs=1e-4)
            assert one.finish_reason == "length"
            assert one.text.endswith(tokenizer.decode(generated))


def test_samples(tiny_model: Path) -> None:
    first, again, each, optional, biased = run("samples", tiny_model)
    texts = [choice.text for choice in first.outputs]
    assert texts == [choice.text for choice in again.outputs]
    assert len(set(texts)) == 3
    assert [len(o.outputs[0].token_ids) for o in each] == [2, 5]
    assert optional.logit_bias == {7: 100.0}
    assert biased.outputs[0].token_ids == [7, 7, 7]


def test_prefix_caching(tiny_model: Path) -> None:
    plain, cached, fresh, salted, ids, between, queued = run("prefixes", tiny_model)
    texts = [o.outputs[0].text for o in plain]
    assert [o.outputs[0].text for o in cached] == texts
    assert [o.num_cached_tokens for o in plain] == [0, 0, 0]
    assert all(o.num_cached_tokens > 100 for o in cached)
    assert fresh[0].num_cached_tokens == salted[0].num_cached_tokens == 0
    assert [o.request_id for o in queued] == ids
    assert [o.outputs[0].text for o in queued] == texts
    assert between[0].finished


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not offered: .* one device"),
        ({"enable_lora": True}, "enable_lora=True is not offered"),
        ({"speculative_config": {"method": "ngram"}}, "no speculative decoding"),
        ({"enable_chunked_prefill": False}, "computed in chunks"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True is not offered"),
        ({"runner": "draft"}, "runner='draft' is not offered"),
        ({"no_such_option": 1}, "no-such-option"),
        ({"chat_template": "{% if %}"}, "no valid chat template"),
        ({"dtype": "int3"}, "--dtype must be one of"),
    ],
)
def test_options_that_ask_for_more_are_refused_by_name(
    tiny_model: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), **options)


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, "'multi_modal_data'"),
        ({"prompt_embeds": [1.0]}, {}, "'prompt_embeds'"),
        ({"cache_salt": "x"}, {}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": "abc"}, {}, "must be integers"),
        ({"prompt_token_ids": [1, True]}, {}, "must be integers"),
        ([[1, 2], [3, 4.5]], {}, "must be integers"),
        ({"prompt": "a", "cache_salt": 5}, {}, "cache_salt"),
        (["a", None], {}, "got NoneType"),
        (7, {}, "must be a list, got int"),
        ("a", {"lora_request": "x"}, "lora_request is not supported"),
        ("a", {"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs is not supported"),
        ("a", {"tokenization_kwargs": {"padding": True}}, "padding is not supported"),
        ("a", {"tokenization_kwargs": {"add_special_tokens": 1}}, "add_special_tokens must be"),
        ("a", {"tokenization_kwargs": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ("a", {"tokenization_kwargs": {"truncate_prompt_tokens": "1"}}, "truncate_prompt_tokens"),
    ],
)
def test_prompts_and_arguments_are_refused_by_name(
    llm: LLM, prompt: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False, **arguments)
    assert not llm._engine._live
    assert llm.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("messages", "arguments"),
    [
        ("hello", {}),
        ([5], {}),
        ([{"role": "user", "content": 5}], {}),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}),
        ([{"role": "user", "content": "a"}], {"chat_template_content_format": "openai"}),
        ([{"role": "user", "content": "a"}], {"tools": [{"type": "function"}]}),
    ],
)
def test_conversations_are_refused_by_name(
    llm: LLM, messages: Any, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, SamplingParams(max_tokens=1), False, **arguments)


@pytest.mark.parametrize("name", ["sleep", "score", "collective_rpc", "get_metrics"])
def test_methods_that_there_are_not_say_why(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"LLM has no {name}\(\): "):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_a_prompt_is_cut_on_demand(llm: LLM) -> None:
    (output,) = llm.generate(
        "abcdef",
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        tokenization_kwargs={"truncate_prompt_tokens": 2},
    )
    assert output.prompt_token_ids == llm.get_tokenizer().encode("ef")


def test_a_progress_bar_of_one_s_own(llm: LLM) -> None:
    counts: list[int] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total = total

        def update(self, count: int) -> None:
            counts.append(count)

        def close(self) -> None:
            counts.append(-self.total)

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    llm.generate(["a", "b", "c"], params, use_tqdm=Bar)  # type: ignore[arg-type]
    assert counts.pop() == -3
    assert sum(counts) == 3
    assert len([count for count in counts if count]) > 1  # not all at the end


# --- parameters ----------------------------------------------------------------------------------


def test_a_parameter_may_be_set_and_is_checked_at_once() -> None:
    params = SamplingParams(max_tokens=5)
    params.temperature = 0.0  # type: ignore[misc]
    params.stop = ["a", "b"]  # type: ignore[misc, assignment]
    assert (params.max_tokens, params.is_greedy, params.stop) == (5, True, ("a", "b"))
    with pytest.raises(InvalidRequestError, match="top_p must be in"):
        params.top_p = 0.0  # type: ignore[misc]
    assert params.top_p == 1.0
    with pytest.raises(AttributeError, match="no field 'temprature'"):
        params.temprature = 1.0


def test_a_clone_changes_by_itself() -> None:
    params = SamplingParams(n=2, seed=3)
    clone = params.clone()
    assert clone == params
    clone.n = 4  # type: ignore[misc]
    assert (params.n, clone.n) == (2, 4)


def test_a_request_keeps_the_parameters_that_it_was_given(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.enqueue("a", params)
    params.max_tokens = 1  # type: ignore[misc]
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": 0.0, "seed": 5}, SamplingType.GREEDY),
        ({"temperature": 1.0}, SamplingType.RANDOM),
        ({"temperature": 1.0, "seed": -1}, SamplingType.RANDOM),
        ({"temperature": 1.0, "seed": 0}, SamplingType.RANDOM_SEED),
    ],
)
def test_the_kind_of_sampling(fields: dict[str, Any], kind: SamplingType) -> None:
    assert SamplingParams(**fields).sampling_type is kind


@pytest.mark.parametrize(
    ("name", "value"),
    [("structured_outputs", {"regex": "a"}), ("no_such", 1), ("thinking_token_budget", 5)],
)
def test_optional_parameters_that_are_not_offered(name: str, value: Any) -> None:
    with pytest.raises(NotSupportedError, match=f"{name} is not supported"):
        SamplingParams.from_optional(**{name: value})
    assert SamplingParams.from_optional(**{name: None}) == SamplingParams()


def test_none_of_max_tokens_is_as_many_as_fit(llm: LLM) -> None:
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None


def test_beams_are_not_constrained_to_a_grammar(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2, structured_outputs={})  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="structured_outputs"):
        llm.beam_search("a", params)


def test_the_window_may_be_filled_by_a_prompt_that_is_only_scored(llm: LLM) -> None:
    window = llm._info.max_model_len
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = llm.generate([[5] * window], score, use_tqdm=False)
    assert len(output.prompt_logprobs or ()) == window
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    for length, max_tokens in ((window, 1), (window + 1, 0)):
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            llm.generate([[5] * length], score.with_changes(max_tokens=max_tokens), use_tqdm=False)
    cut = {"truncate_prompt_tokens": -1}
    (whole,) = llm.generate([[5] * (window + 9)], score, use_tqdm=False, tokenization_kwargs=cut)
    assert len(whole.prompt_token_ids) == window
