"""Known faults J: what the model's files say is what is computed, or they are refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError, ConfigError, InvalidRequestError
from octavo.engine.models.loader import load_model, open_weights
from octavo.engine.text.tokenizer import Tokenizer
from octavo.kernels.select import select_ops

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("end_id", [256, 257])
@pytest.mark.parametrize(
    "files",
    [
        {"eos": None, "generation_eos": [256, 257]},
        {"eos": 256, "generation_eos": 257},
        {"eos": [256, 257]},
        {"eos": 256, "tokenizer_eos": "<|special1|>"},
        {"eos": None, "generation_eos": 257, "tokenizer_eos": "<|special0|>"},
        {"eos": 256, "special_eos": "<|special1|>"},
        {"eos": None, "tokenizer_eos": "<|special0|>", "special_eos": "<|special1|>"},
    ],
)
def test_j02_every_source_of_end_ids_counts(
    tmp_path: Path, write_model: Callable[..., Path], files: dict[str, Any], end_id: int
) -> None:
    with LLM(str(write_model(tmp_path / "m", **files))) as llm:
        params = GREEDY.with_changes(logit_bias={end_id: 100.0})
        for output in (
            *llm.generate([[1, 2]], params, use_tqdm=False),
            *llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False),
        ):
            (one,) = output.outputs
            assert one.token_ids == [end_id]
            assert (one.finish_reason, one.text, one.stop_reason) == ("stop", "", None)
        other = llm.generate([[1, 2]], GREEDY.with_changes(logit_bias={258: 100.0}), use_tqdm=False)
    assert len(other[0].outputs[0].token_ids) == 8  # no end id: goes on


def test_j03_rows_of_q_and_k_are_transformers_own(model_path: Path, oracle: Any) -> None:
    """GGUF stores them permuted; nine query heads and three of keys and values."""
    source, expected = open_weights(open_checkpoint(model_path)), dict(oracle.named_parameters())
    for layer in range(30):
        for kind, num_heads in (("q", 9), ("k", 3), ("v", 3)):
            name = f"model.layers.{layer}.self_attn.{kind}_proj.weight"
            got, want = source.load(name, torch.float32), expected[name].detach()
            assert got.shape == want.shape == (64 * num_heads, 576)
            cosine = torch.cosine_similarity(got.double(), want.double(), dim=1)
            assert cosine.min() > 0.99  # of each row


def test_j03_the_text_is_transformers_own(
    exact: Any, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    for text in ("The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,"):
        prompt = tokenizer.encode(text)
        choice = exact.ask(C, prompt=text, max_tokens=12, return_token_ids=True, ignore_eos=True)
        ids = choice["choices"][0]["token_ids"]
        table = logprobs_of(prompt + ids)[len(prompt) - 1 : -1]
        assert ids == table.argmax(dim=-1).tolist()


def test_j04_a_tied_head_is_the_embedding_and_others_have_their_own(
    tmp_path: Path, write_model: Callable[..., Path], model_path: Path
) -> None:
    ops = select_ops("reference", CPU)

    def load(folder: Path) -> Any:
        return load_model(open_checkpoint(folder), ops, dtype=torch.float32, device=CPU)

    def edited(name: str, tie: bool, **tensors: Any) -> Path:
        folder = write_model(tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tie}))
        weights = load_file(folder / "model.safetensors") | tensors
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    head = torch.randn(259, 32)
    tied = load(edited("tied", True))
    own = load(edited("own", False, **{"lm_head.weight": head}))
    hidden = torch.randn(3, 32)
    embedding = load_file(tmp_path / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(tied.logits(hidden), hidden @ embedding.T)
    torch.testing.assert_close(own.logits(hidden), hidden @ head.T)
    assert own.num_parameters - tied.num_parameters == head.numel()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(edited("missing", False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(edited("differs", True, **{"lm_head.weight": head}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.strange\.weight"):
        load(edited("more", True, **{"model.layers.9.strange.weight": torch.ones(2)}))
    embedded = load(model_path)  # 272 tensors, none of them a head
    assert embedded.num_parameters < 136_000_000


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
        {"rope_scaling": {"type": "no-such"}},
        {"rope_parameters": {"rope_type": "no-such", "rope_theta": 10000.0}},
    ],
)
def test_j07_rotary_scaling_that_is_not_computed_is_refused(
    tmp_path: Path, write_model: Callable[..., Path], rope: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "m", **rope)
    ((_, scaling),) = rope.items()
    kind = scaling.get("rope_type") or scaling["type"]
    with pytest.raises(CheckpointError, match=f"rope type {kind} is not supported"):
        LLM(str(folder))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ],
)
def test_j07_dynamic_scaling_changes_nothing_within_the_window_and_is_not_passed(
    tmp_path: Path, write_model: Callable[..., Path], rope: dict[str, Any]
) -> None:
    """Past ``max_position_embeddings`` the base would depend on each sequence's length, which cached keys
    cannot follow: so octavo goes up to there, whatever is asked for."""
    scaled, plain = write_model(tmp_path / "m", **rope), write_model(tmp_path / "n")
    window = json.loads((plain / "config.json").read_text())["max_position_embeddings"]
    params = SamplingParams(max_tokens=window, ignore_eos=True, temperature=0.0)
    prompts = [[index % 97 for index in range(length)] for length in (1, window // 8, window // 4)]
    texts = []
    for folder in (scaled, plain):
        with LLM(str(folder), dtype="float32") as llm:
            answers = [llm.generate(ids, params, use_tqdm=False)[0] for ids in prompts * 2]
            texts.append([list(answer.outputs[0].token_ids) for answer in answers])
            assert all(
                len(ids) + len(answer) == window
                for ids, answer in zip(prompts * 2, texts[-1], strict=True)
            )
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=f"more than the model's window of {window} tokens"):
        LLM(str(scaled), max_model_len=window + 1)


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5,",
    "To be, or not to be",
    "A list of fruit:\n\n1. apples\n2.",
    "Q: What is the largest planet?\nA:",
    "Paris, London, Berlin, " * 8,
]


@pytest.mark.native
def test_j08_greedy_answers_are_the_same_in_any_batch(
    model_path: Path, tokenizer: Tokenizer
) -> None:
    """The native kernels promise it bit for bit: the log-probabilities are equal too."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    prompts = [tokenizer.encode(text) for text in PROMPTS]

    def answers(llm: LLM, order: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        found = llm.generate([prompts[i] for i in order], params, use_tqdm=False)
        ones = {i: output.outputs[0] for i, output in zip(order, found, strict=True)}
        return {
            i: (
                one.token_ids,
                [e[t].logprob for e, t in zip(one.logprobs or (), one.token_ids, strict=True)],
            )
            for i, one in ones.items()
        }

    rng = random.Random(8)
    with LLM(str(model_path), enable_prefix_caching=False) as llm:
        alone = {i: answers(llm, [i])[i] for i in range(len(prompts))}
    assert all(len(told) == 16 for _, told in alone.values())
    for options in ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 13}):
        with LLM(str(model_path), max_num_seqs=13, check_invariants=True, **options) as llm:
            for _ in range(2):  # cold, then with every prompt cached
                order = [*range(len(prompts))]
                rng.shuffle(order)
                assert answers(llm, order) == alone
            assert llm.stats().prefix_cache_hits > 0


def test_j11_the_rows_of_the_model_are_the_limit_and_holes_are_no_tokens(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    more = {f"<|more{i}|>": i for i in (300, 301, 303, 304)}
    folder = write_model(tmp_path / "m", more_tokens=more, num_rows=305)
    with LLM(str(folder)) as llm:
        params = GREEDY.with_changes(max_tokens=2, skip_special_tokens=False)
        for token_id in (258, 300, 304):
            (output,) = llm.generate([token_id], params, use_tqdm=False)
            assert output.prompt_token_ids == [token_id]
            biased = params.with_changes(logit_bias={token_id: 100.0})
            (output,) = llm.generate([1], biased, use_tqdm=False)
            assert output.outputs[0].token_ids == [token_id] * 2
        (output,) = llm.generate("a<|more303|>b", params, use_tqdm=False)
        assert 303 in output.prompt_token_ids
        for hole in (302, 299, 305, -1):
            with pytest.raises(InvalidRequestError, match=str(hole)) as refused:
                llm.generate([1, hole], params, use_tqdm=False)
            assert refused.value.param == "prompt"
            for field, value in (
                ("logit_bias", {hole: 1.0}),
                ("stop_token_ids", (hole,)),
                ("allowed_token_ids", (1, hole)),
            ):
                with pytest.raises(InvalidRequestError, match=str(hole)) as refused:
                    llm.generate([1], params.with_changes(**{field: value}), use_tqdm=False)
                assert refused.value.param == field


@pytest.mark.parametrize(
    ("config", "model_max_length", "window"),
    [
        ({"window": 512}, None, 512),
        ({"window": 512}, 512, 512),
        ({"window": 512}, 1000000000000000019884624838656, 512),  # transformers' "unknown"
        ({"window": 512}, 128, 128),  # the smallest
        ({"window": 512}, 4096, 512),
        ({"window": 512}, "512", 512),
        ({"window": 512, "sliding_window": 64}, None, 512),  # Llama has none
        ({"window": 512, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None, 512),
        ({"window": 512, "max_sequence_length": 64, "seq_length": 32}, None, 512),
    ],
)
def test_j11_the_window_by_its_rule(
    tmp_path: Path,
    write_model: Callable[..., Path],
    config: dict[str, Any],
    model_max_length: Any,
    window: int,
) -> None:
    folder = write_model(tmp_path / "m", **config)
    if model_max_length is not None:
        path = folder / "tokenizer_config.json"
        old = json.loads(path.read_text())
        path.write_text(json.dumps({**old, "model_max_length": model_max_length}))

    def length(**options: Any) -> int:
        with LLM(str(folder), **options) as llm:
            params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
            (output,) = llm.generate([1, 2], params, use_tqdm=False)
            return 2 + len(output.outputs[0].token_ids)

    assert length() == window
    assert length(max_model_len=50) == 50  # an operator may lower it
    assert length(max_model_len=512) == 512  # and raise it, as far as the positions go
    with pytest.raises(ConfigError, match="--max-model-len 513 is more than the model's"):
        LLM(str(folder), max_model_len=513)


def test_j11_the_card_has_the_window(exact: Any, tiny: Any) -> None:
    for probe, window in ((exact, 8192), (tiny, 512)):
        for card in probe.http.get("/v1/models").json()["data"]:
            assert card["max_model_len"] == window


def test_j13_logits_that_are_no_numbers_fail_their_own_request(poisoned: Any) -> None:
    probe, sick, well = poisoned, [1, 7, 3], [1, 2, 3]
    probe.canary()
    healthy = probe.text(prompt=well, max_tokens=8, ignore_eos=True)
    failed = probe.metric("vllm:corrupted_requests_total")
    neighbour = probe.connect(C, prompt=well, max_tokens=300, ignore_eos=True)
    neighbour.read_until(b"data: ")
    whole = probe.send(C, prompt=sick, max_tokens=4)
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "generation_failed"
    assert "finite" in whole.json()["error"]["message"]
    error, *rest = probe.stream(C, prompt=sick, max_tokens=4)
    assert error["error"]["code"] == "generation_failed"  # and no empty "stop"
    assert not rest
    scored = probe.send(C, prompt=sick, max_tokens=0, echo=True, logprobs=1)
    assert scored.status_code == 500
    events = neighbour.read_until(b"[DONE]")
    neighbour.close()
    assert b'"finish_reason":"length"' in events
    assert b"error" not in events
    assert probe.metric("vllm:corrupted_requests_total") == failed + 3
    assert probe.text(prompt=well, max_tokens=8, ignore_eos=True) == healthy
    assert probe.send(C, prompt=sick, max_tokens=1).status_code == 500  # nor is it cached
    probe.audit()
    probe.canary()


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=pytest.mark.native)])
def test_j13_in_every_precision(
    tmp_path: Path, write_model: Callable[..., Path], dtype: str, backend: str
) -> None:
    folder = write_model(tmp_path / "m", nan_token=7)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = 3e38  # whose square no float holds
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with LLM(str(folder), dtype=dtype, attention_backend=backend) as llm:
        sick, well = llm.generate([[1, 7], [1, 2]], GREEDY, use_tqdm=False)
        assert well.outputs[0].finish_reason in ("length", "stop")
        assert well.error is None
        assert len(well.outputs[0].token_ids) > 0
        if sick.error is None:  # the norm may have brought it back: then it is an ordinary answer
            assert sick.outputs[0].token_ids
        else:
            assert "finite" in sick.error
            assert sick.outputs[0].finish_reason == "error"
            assert sick.outputs[0].token_ids == []


def test_j13_float16_is_not_offered_where_it_overflows(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        LLM(str(tiny_path), dtype="float16")


def test_a_folder_can_be_moved(tmp_path: Path, tiny_path: Path) -> None:
    """Of the kind of J04: nothing but the folder is read."""
    moved = shutil.copytree(tiny_path, tmp_path / "elsewhere")
    with LLM(str(tiny_path)) as here, LLM(str(moved)) as there:
        outputs = [llm.generate([1, 2], GREEDY, use_tqdm=False)[0] for llm in (here, there)]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
