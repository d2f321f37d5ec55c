"""The whole engine with the Triton set on a tiny random model: what it answers is what the reference answers,
and no step waits for the device but for its samples."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.engine.execution.runner import ModelRunner
from octavo.engine.execution.transfer import Transfer
from octavo.engine.step import BlockCopy, NewRow, ScheduledRow, StepPlan
from octavo.kernels.select import select_ops
from octavo.kernels.triton_ops import TritonOps

CPU = torch.device("cpu")
PROMPTS = [[(7 * i + j) % 250 for j in range(length)] for i, length in enumerate((3, 17, 40, 1))]
TINY = SimpleNamespace(
    vocab_size=320, hidden_size=128, intermediate_size=96, num_layers=2, num_q_heads=2, num_kv_heads=1,
    head_dim=64, tie_word_embeddings=True, max_positions=512,
)  # fmt: skip
SMALL = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 40, "max_num_seqs": 8}
"""A large step would be warmed up, by the interpreter."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def random_model() -> ModuleType:
    """``benchmarks/random_model.py``."""
    path = Path(__file__).parents[3] / "benchmarks" / "random_model.py"
    spec = importlib.util.spec_from_file_location("random_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(random_model: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = random_model.write_model(tmp_path_factory.mktemp("tiny"), TINY, torch.float32)
    return path


def _answers(
    folder: Path, backend: str, ask: Callable[[LLM], Any], **options: Any
) -> tuple[Any, int]:
    """What an engine answers, and how many requests it preempted meanwhile."""
    with LLM(
        str(folder),
        attention_backend=backend,
        device="cpu",
        check_invariants=True,
        **{**SMALL, **options},
    ) as llm:
        assert llm.stats().num_used_blocks == 0
        found = ask(llm)
        return found, llm.stats().num_preemptions


def _generate(params: SamplingParams) -> Callable[[LLM], Any]:
    def ask(llm: LLM) -> Any:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [[one.token_ids for one in output.outputs] for output in outputs]

    return ask


def test_greedy_in_a_batch_and_in_chunks(folder: Path) -> None:
    expected, _ = _answers(folder, "reference", _generate(GREEDY))
    assert len({tuple(one[0]) for one in expected}) == len(PROMPTS)
    for options in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}):
        assert _answers(folder, "triton", _generate(GREEDY), **options)[0] == expected


@pytest.mark.parametrize(
    "params", [DRAWN, DRAWN.with_changes(n=3), GREEDY.with_changes(repetition_penalty=1.3)]
)
def test_drawn_forked_and_reported(folder: Path, params: SamplingParams) -> None:
    ask = _generate(params)
    assert _answers(folder, "triton", ask)[0] == _answers(folder, "reference", ask)[0]


def test_preempted_and_moved_to_the_host_and_back(folder: Path) -> None:
    ask = _generate(GREEDY.with_changes(max_tokens=20))
    expected, _ = _answers(folder, "reference", ask)
    for options in (
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "swap_space": 0.01},
    ):
        small = {"num_gpu_blocks_override": 5, "watermark": 0.0, **options}
        found, num_preemptions = _answers(folder, "triton", ask, **small)
        assert found == expected
        assert num_preemptions > 0


def test_beams(folder: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)

    def ask(llm: LLM) -> Any:
        return [
            [one.tokens for one in found.sequences]
            for found in llm.beam_search(PROMPTS[:2], params)
        ]

    assert _answers(folder, "triton", ask)[0] == _answers(folder, "reference", ask)[0]


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on ops whose result's shape or value the host would have to wait for on a GPU."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "_unique2",
        "unique_dim",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITING:
            raise AssertionError(f"{name} waits for the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [one for one in args[1] if one is not None and one.dtype == torch.bool]
            if masks:
                raise AssertionError(f"{name} by a mask waits for the device")
        return func(*args, **(kwargs or {}))


class _WatchedTransfer(Transfer):
    """An asynchronous device that is the CPU. Counts where a step waits, and allows it nowhere else."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.is_asynchronous = True
        self.num_downloads = 0
        self._is_downloading = False

    def download(self, *columns: Tensor) -> list[list[int]]:
        self.num_downloads += 1
        self._is_downloading = True
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return super().download(*columns)
        finally:
            self._is_downloading = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        tolist, patch = Tensor.tolist, pytest.MonkeyPatch()

        def watched(tensor: Tensor) -> Any:
            assert self._is_downloading, "tolist waits for the device"
            return tolist(tensor)

        patch.setattr(Tensor, "tolist", watched)
        try:
            with _NoWaiting():  # type: ignore[no-untyped-call]
                yield
        finally:
            patch.undo()


@pytest.fixture
def runner_of(random_model: ModuleType) -> Callable[[Transfer], ModelRunner]:
    def make(transfer: Transfer) -> ModelRunner:
        ops = select_ops("triton", CPU)
        assert isinstance(ops, TritonOps)
        model = random_model.build_model(TINY, ops, torch.float32, CPU)
        return ModelRunner(
            model, ops, num_blocks=20, block_size=16, max_num_seqs=8, max_model_len=128,
            device=CPU, eos_token_ids=(2,), transfer=transfer,
        )  # fmt: skip

    return make


def _plans() -> list[StepPlan]:
    """Prompts of every sampling kind, a mixed step with a block copied, penalties, a bad row of samples."""
    sampling = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=2),
        SamplingParams(temperature=1.0, logit_bias={5: 4.0}),
    ]
    news = tuple(NewRow(i, [3 + i, 9, 200 + i], (), one, i) for i, one in enumerate(sampling))
    first = tuple(ScheduledRow(i, 0, 3, 1, ([i],), 0) for i in range(5))
    second = (
        *(ScheduledRow(i, 3, 1, 1, ([i],), 1) for i in range(5)),
        ScheduledRow(5, 0, 3, 2, ([5],), 0),
    )
    return [
        StepPlan(1, new_rows=news, rows=first),
        StepPlan(2, block_copies=(BlockCopy(0, 7, 8),), rows=second),
    ]


def test_a_step_waits_once_for_its_samples(
    runner_of: Callable[[Transfer], ModelRunner],
) -> None:
    watched = _WatchedTransfer()
    ordinary, waiting = runner_of(Transfer(CPU)), runner_of(watched)
    for index, plan in enumerate(_plans()):
        plain = ordinary.submit(plan).result()
        with watched.watching():
            handle = waiting.submit(plan)
            assert watched.num_downloads == index
            assert handle.result() == plain
        assert watched.num_downloads == index + 1


def test_the_watch_sees_what_waits() -> None:
    watched = _WatchedTransfer()
    x = torch.arange(4)
    for wait in (
        lambda: bool(x.any()),
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: x.tolist(),
        lambda: int(x.max()),
    ):
        with pytest.raises(AssertionError, match="waits for the device"), watched.watching():
            wait()
