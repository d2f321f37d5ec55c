from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.engine.api import (
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.config.supervision import Supervision
from octavo.engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    NotSupportedError,
)
from octavo.engine.service.client import EngineClient
from octavo.engine.stats import EngineStats, RequestRecord

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


class Sink:
    def __init__(self) -> None:
        self.step_tokens: list[int] = []
        self.ttft: list[float] = []
        self.itl: list[float] = []
        self.records: list[RequestRecord] = []
        self.last: EngineStats | None = None

    def record_step(self, stats: EngineStats, num_step_tokens: int) -> None:
        self.step_tokens.append(num_step_tokens)
        self.last = stats

    def record_stats(self, stats: EngineStats) -> None:
        self.last = stats

    def record_first_token(self, ttft_s: float) -> None:
        self.ttft.append(ttft_s)

    def record_inter_token(self, itl_s: float) -> None:
        self.itl.append(itl_s)

    def record_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


@asynccontextmanager
async def running(model: Path, mode: str = "none", **options: Any) -> AsyncIterator[EngineClient]:
    config = EngineConfig.from_options({"model": str(model), **options})
    command = [sys.executable, "-P", str(FAKE_ENGINE), mode]
    supervision = Supervision(max_restarts=0)
    client = EngineClient(config, open_checkpoint(model), command, "warning", supervision)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


def is_ready(client: EngineClient) -> bool:
    try:
        client.check_ready()
    except EngineNotReadyError:
        return False
    return True


def request(
    request_id: str, token_ids: list[int], max_tokens: int | None = 4, **params: Any
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return GenerationRequest(request_id, TokensPrompt(token_ids), sampling, time.monotonic())


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))


async def collect(stream: Any) -> tuple[list[int], str, Any]:
    ids: list[int] = []
    text = ""
    last = None
    async for output in stream:
        for delta in output.outputs:
            ids += delta.token_ids
            text += delta.text
            last = delta
    return ids, text, last


def test_tokens_arrive_in_order_and_the_engine_goes_idle(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            streams = await client.submit([request(f"r{i}", [i, i + 1], 5) for i in range(10)])
            results = await asyncio.gather(*map(collect, streams))
            for i, (ids, _, last) in enumerate(results):
                assert ids == [i + 2, i + 3, i + 4, i + 5, i + 6]
                assert last.finish_reason is FinishReason.LENGTH
            await until(lambda: sink.last is not None and sink.last.num_running == 0)
            assert sink.last is not None
            assert sink.last.num_used_blocks == 0
            assert len(sink.ttft) == 10
            assert len(sink.itl) == 40
            assert sum(sink.step_tokens) == 10 * (2 + 5)
            assert {record.finish_reason for record in sink.records} == {FinishReason.LENGTH}
            assert all(r.queue_s is not None and r.queue_s >= 0 for r in sink.records)

    play(scene)


def test_nothing_is_accepted_before_ready_and_start_does_not_wait(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "stuck") as client:
            with pytest.raises(EngineNotReadyError):
                await client.submit([request("a", [1])])
            await until(lambda: client.progress.stage == "loading")
            client.check_alive()

    play(scene)


def test_abort_frees_the_blocks_within_a_step(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [1, 2], 400)])
            await stream.__anext__()
            stream.abort()
            stream.abort()
            ids, _, last = await collect(stream)
            assert last.finish_reason is FinishReason.ABORT
            assert len(ids) < 100
            await until(lambda: sink.last is not None and sink.last.num_used_blocks == 0, 1.0)
            num_tokens = sink.last.num_generation_tokens if sink.last else 0
            await asyncio.sleep(0.2)
            assert sink.last is not None
            assert sink.last.num_generation_tokens == num_tokens
            assert [record.finish_reason for record in sink.records] == [FinishReason.ABORT]

    play(scene)


def test_slow_reader_gets_everything_merged(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [64], 60)])
            await asyncio.sleep(1.0)
            outputs = [output async for output in stream]
            assert len(outputs) == 1
            assert outputs[0].outputs[0].token_ids == list(range(65, 125))
            assert outputs[0].finished

    play(scene)


def test_stop_string_ends_the_request_in_the_engine_too(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            first = client._door().tokenizer.encode("A")[0]
            (stream,) = await client.submit([request("a", [first], 400, stop=("EFG",))])
            _, text, last = await collect(stream)
            assert text == "BCD"
            assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "EFG")
            await until(lambda: sink.last is not None and sink.last.num_used_blocks == 0, 1.0)

    play(scene)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (TokensPrompt([]), {}, "prompt"),
        (TextPrompt(""), {}, "prompt"),
        (TokensPrompt([259]), {}, "prompt"),
        (TokensPrompt([-1]), {}, "prompt"),
        (TokensPrompt([1] * 512), {}, "prompt"),
        (TextPrompt("x" * 600), {}, "prompt"),
        (TextPrompt("x" * 10_000_000), {}, "prompt"),
        (TokensPrompt([1]), {"max_tokens": 513}, "max_tokens"),
        (TokensPrompt([1]), {"max_tokens": 0}, "max_tokens"),
        (TokensPrompt([1]), {"stop_token_ids": (259,)}, "stop_token_ids"),
        (TokensPrompt([1]), {"logit_bias": {259: 1.0}}, "logit_bias"),
        (TokensPrompt([1]), {"n": 9}, "n"),
        (TokensPrompt([1]), {"n": 8, "max_tokens": 400}, "max_tokens"),
        (TokensPrompt([1]), {"n": 2, "best_of": 9}, "best_of"),
        (TokensPrompt([1]), {"n": 9, "use_beam_search": True}, "n"),
        (TokensPrompt([1]), {"n": 7, "max_tokens": 142, "use_beam_search": True}, "max_tokens"),
        (TokensPrompt([1]), {"logprobs": 21}, "logprobs"),
        (TokensPrompt([1]), {"logprobs": -1}, "logprobs"),
        (TokensPrompt([1]), {"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_wrong_requests_are_refused_by_name_and_cost_nothing(
    tiny_model: Path, prompt: Any, params: dict[str, Any], param: str
) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            sampling = SamplingParams(**{"max_tokens": 4, **params})
            bad = GenerationRequest("bad", prompt, sampling, time.monotonic())
            with pytest.raises(InvalidRequestError) as refusal:
                await client.submit([request("good", [1]), bad])
            assert refusal.value.param == param
            stats = client.stats()
            assert stats is None or stats.num_steps == 0
            (stream,) = await client.submit([request("good", [1])])
            assert (await collect(stream))[0] == [2, 3, 4, 5]

    play(scene)


def test_what_cannot_fit_the_pool_is_refused_with_numbers(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, num_gpu_blocks_override=4) as client:
            await until(lambda: is_ready(client))
            with pytest.raises(InvalidRequestError, match="5 KV blocks of 16 tokens; there are 4"):
                await client.submit([request("a", [1] * 50, 20)])
            (stream,) = await client.submit([request("b", [1] * 50, None)])
            ids, _, last = await collect(stream)
            assert len(ids) == 14
            assert last.finish_reason is FinishReason.LENGTH

    play(scene)


def test_the_pool_rule_leaves_a_beam_one_block_more(tiny_model: Path) -> None:
    """32 prompt tokens, 2 sequences: 2 blocks shared, and with 8 in all (8 - 2) // 2 for each to grow into."""

    async def scene() -> None:
        async with running(tiny_model, num_gpu_blocks_override=8) as client:
            await until(lambda: is_ready(client))
            admission = client._door()
            for is_beam, num_fitting in ((False, 48), (True, 32)):
                params = {"n": 2, "use_beam_search": is_beam}
                asked = admission.admit(request("a", [1] * 32, num_fitting, **params))
                assert asked.new.sampling.max_tokens == num_fitting
                clamped = admission.admit(request("a", [1] * 32, None, **params))
                assert clamped.new.sampling.max_tokens == num_fitting
                with pytest.raises(InvalidRequestError, match="KV blocks") as refusal:
                    admission.admit(request("a", [1] * 32, num_fitting + 1, **params))
                assert refusal.value.param == "max_tokens"

    play(scene)


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", "\ud800"])
def test_a_salt_that_cannot_be_is_refused(tiny_model: Path, salt: str) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            admission = client._door()
            good = replace(request("a", [1]), cache_salt="x" * 128)
            assert admission.admit(good).new.cache_salt == "x" * 128
            with pytest.raises(InvalidRequestError) as refusal:
                admission.admit(replace(good, cache_salt=salt))
            assert refusal.value.param == "cache_salt"

    play(scene)


def test_best_of_gives_the_best_at_the_end_and_counts_all(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            asked = request("a", [64], 5, n=2, best_of=4, seed=2, ignore_eos=True)
            (stream,) = await client.submit([asked])
            (output,) = [output async for output in stream]
            assert [o.cumulative_logprob for o in output.outputs] == [-15.0, -20.0]
            assert [o.index for o in output.outputs] == [0, 1]
            assert [o.token_ids for o in output.outputs] == [[65, 66, 67, 68, 69]] * 2
            assert output.num_discarded_tokens == 10
            assert [record.num_generation_tokens for record in sink.records] == [20]

    play(scene)


def test_beams_arrive_at_the_end_and_leave_nothing(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [64], 3, n=2, use_beam_search=True)])
            (output,) = [output async for output in stream]
            assert [o.cumulative_logprob for o in output.outputs] == [-3.0, -4.0]
            assert output.outputs[0].token_ids == [65, 66, 67]
            assert [o.finish_reason for o in output.outputs] == [FinishReason.LENGTH] * 2
            await until(lambda: sink.last is not None and sink.last.num_used_blocks == 0, 1.0)

    play(scene)


@pytest.mark.parametrize("params", [{"best_of": 4}, {"use_beam_search": True}])
def test_aborting_ranked_choices_half_way_ends_each_of_them(
    tiny_model: Path, params: dict[str, Any]
) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [1], 100, n=2, seed=0, **params)])
            await until(lambda: sink.last is not None and sink.last.num_steps > 3)
            stream.abort()
            (output,) = [output async for output in stream]
            assert [o.finish_reason for o in output.outputs] == [FinishReason.ABORT] * 2
            await until(lambda: sink.last is not None and sink.last.num_used_blocks == 0, 1.0)

    play(scene)


def test_a_stop_string_of_one_choice_ends_that_choice_only(tiny_model: Path) -> None:
    """All children draw the same tokens, so each ends by the string; none waits for another."""

    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            first = client._door().tokenizer.encode("A")[0]
            asked = request("a", [first], 200, n=1, best_of=3, seed=0, stop=("EFG",))
            (stream,) = await client.submit([asked])
            (output,) = [output async for output in stream]
            (best,) = output.outputs
            assert (best.text, best.stop_reason) == ("BCD", "EFG")
            assert best.cumulative_logprob == -len(best.token_ids)
            await until(lambda: sink.last is not None and sink.last.num_used_blocks == 0, 1.0)

    play(scene)


def test_the_memory_is_shown_between_steps(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow", num_gpu_blocks_override=32) as client:
            await until(lambda: is_ready(client))
            empty = await client.kv_snapshot()
            assert (empty.num_blocks, empty.block_size, empty.sequences) == (32, 16, ())
            assert [block.id for block in empty.blocks] == list(range(32))
            (stream,) = await client.submit([request("a", list(range(40)), 200)])
            await stream.__anext__()
            snapshots = await asyncio.gather(*(client.kv_snapshot() for _ in range(100)))
            for snapshot in snapshots:
                (sequence,) = snapshot.sequences
                assert (sequence.request_id, sequence.status) == ("a", "running")
                assert len(sequence.block_table) == -(-sequence.num_tokens // 16)
                for block_id in sequence.block_table:
                    assert snapshot.blocks[block_id].seq_ids == (sequence.seq_id,)
                    assert snapshot.blocks[block_id].ref_count == 1
            stream.abort()

    play(scene)


def test_a_reset_forgets_what_was_cached(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))

            async def num_cached() -> int:
                (stream,) = await client.submit([request("a", list(range(40)))])
                return [output.num_cached_tokens async for output in stream][-1]

            assert await num_cached() == 0
            assert await num_cached() > 0
            await client.reset_prefix_cache()
            assert not any(block.is_cached for block in (await client.kv_snapshot()).blocks)
            assert await num_cached() == 0

    play(scene)


def test_questions_need_a_ready_engine(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "stuck") as client:
            for ask in (client.kv_snapshot, client.reset_prefix_cache):
                with pytest.raises(EngineNotReadyError):
                    await ask()

    play(scene)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_no_question_waits_for_an_engine_that_ends(tiny_model: Path, how: str) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            psutil.Process(client._lives.current.process.pid).suspend()  # it will not answer
            asks = (client.kv_snapshot, client.reset_prefix_cache)
            waiting = [asyncio.ensure_future(ask()) for ask in asks]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting)
            if how == "killed":
                client._lives.current.process.kill()
            else:
                await client.close()
            for task in waiting:
                with pytest.raises(EngineDeadError):
                    await task
            assert client._questions._waiting == {}

    play(scene)


def test_an_answer_that_nobody_waits_for_is_dropped(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            task = asyncio.ensure_future(client.kv_snapshot())
            await asyncio.sleep(0)
            task.cancel()
            await client.kv_snapshot()
            client.check_alive()
            assert client._questions._waiting == {}

    play(scene)


def test_chat_is_rendered_by_the_model_template(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            prompt = ChatPrompt([{"role": "user", "content": "hi"}])
            chat = GenerationRequest("a", prompt, SamplingParams(max_tokens=1), time.monotonic())
            (stream,) = await client.submit([chat])
            (output,) = [output async for output in stream]
            assert output.prompt == "<|start|>user: hi<|stop|><|start|>assistant: "
            assert 257 in output.prompt_token_ids

    play(scene)


def test_a_model_without_a_chat_template_says_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "tokenizer_config.json").unlink()

    async def scene() -> None:
        async with running(folder) as client:
            await until(lambda: is_ready(client))
            prompt = ChatPrompt([{"role": "user", "content": "hi"}])
            chat = GenerationRequest("a", prompt, SamplingParams(max_tokens=1), time.monotonic())
            with pytest.raises(InvalidRequestError, match="--chat-template") as refusal:
                await client.submit([chat])
            assert refusal.value.param == "messages"

    play(scene)


def test_not_supported_is_an_invalid_request() -> None:
    assert issubclass(NotSupportedError, InvalidRequestError)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("crash", "ended with status 7"), ("raise", "the kernel broke")],
)
def test_a_dead_engine_is_told_to_everyone_at_once(
    tiny_model: Path, mode: str, reason: str
) -> None:
    async def scene() -> None:
        async with running(tiny_model, mode) as client:
            await until(lambda: is_ready(client))
            streams = await client.submit([request(f"r{i}", [i], 400) for i in range(3)])
            for stream in streams:
                with pytest.raises(EngineDeadError, match=reason):
                    await collect(stream)
            await asyncio.wait_for(client.wait_dead(), 2)
            with pytest.raises(EngineDeadError):
                client.check_alive()
            with pytest.raises(EngineDeadError):
                await client.submit([request("late", [1])])

    play(scene)


def test_a_failed_load_says_why_in_its_own_words(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "unloadable") as client:
            await asyncio.wait_for(client.wait_dead(), 10)
            with pytest.raises(EngineDeadError, match=r"^--model: this cannot be loaded\.$"):
                client.check_alive()

    play(scene)


def test_close_ends_streams_and_leaves_no_process_or_socket(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [1], 400)])
            await stream.__anext__()
            pid, folder = client._lives.current.process.pid, client._lives.current.folder
            await client.close()
            _, _, last = await collect(stream)
            assert last.finish_reason is FinishReason.ABORT
            assert not psutil.pid_exists(pid)
            assert not folder.exists()
            with pytest.raises(EngineNotReadyError):
                client.check_ready()

    play(scene)


def test_the_engine_ends_with_its_front_end(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(
        f"""
import asyncio, sys, os
sys.path.insert(0, {str(Path(__file__).parent)!r})
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.service.client import EngineClient
async def main():
    config = EngineConfig.from_options(dict(model={str(tiny_model)!r}))
    client = EngineClient(config, open_checkpoint(config.model.model),
                          [sys.executable, {str(FAKE_ENGINE)!r}], "warning")
    await client.start()
    print(client._lives.current.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    )
    import subprocess

    front = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    assert psutil.pid_exists(pid)
    front.kill()
    front.wait()
    deadline = time.monotonic() + 2
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "data", [b"\x80\x04cos\nsystem\n.", os.urandom(64)], ids=["pickle", "noise"]
)
def test_a_damaged_frame_ends_the_engine_loudly(tiny_model: Path, data: bytes) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [1], 400)])
            client._lives.current.socket.send(data)
            with pytest.raises(EngineDeadError, match="Error"):
                await collect(stream)

    play(scene)


@pytest.mark.parametrize("error", [ValueError("bad vocabulary"), ConfigError("no tokenizer.json")])
def test_a_tokenizer_that_cannot_be_loaded_is_the_end(
    tiny_model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("octavo.engine.service.client.load_tokenizer", broken)

    async def scene() -> None:
        async with running(tiny_model) as client:
            await asyncio.wait_for(client.wait_dead(), 10)
            with pytest.raises(EngineDeadError, match=str(error)):
                client.check_alive()
            assert client.progress.stage != "ready"

    play(scene)


def test_an_error_while_delivering_fails_the_streams(tiny_model: Path) -> None:
    class Broken(Sink):
        def record_inter_token(self, itl_s: float) -> None:
            raise ZeroDivisionError("sink")

    async def scene() -> None:
        async with running(tiny_model) as client:
            client.set_stats_sink(Broken())
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("a", [1])])
            with pytest.raises(EngineDeadError, match="sink"):
                await collect(stream)

    play(scene)


def test_preemptions_are_told_of_requests_that_end_by_a_stop_string(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, num_gpu_blocks_override=5) as client:
            sink = Sink()
            client.set_stats_sink(sink)
            await until(lambda: is_ready(client))
            ids = [client._door().tokenizer.encode(c)[0] for c in "AB"]
            first = request("a", [ids[0]] * 30, 40, ignore_eos=True)
            second = request("b", [ids[1]] * 30, 40, ignore_eos=True, stop=("XYZ",))
            streams = await client.submit([first, second])
            await asyncio.gather(*map(collect, streams))
            by_reason = {record.finish_reason: record for record in sink.records}
            assert by_reason[FinishReason.STOP].num_preemptions > 0

    play(scene)


def test_no_socket_file_is_left_once_the_engine_has_connected(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            assert not client._lives.current.folder.exists()

    play(scene)


def test_tokenising_and_rendering_answer_without_computing(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            beyond_the_window = await client.tokenize(TextPrompt("hé" * 600))
            assert len(beyond_the_window) == 3 * 600  # bytes
            assert await client.detokenize(beyond_the_window) == "hé" * 600
            ids = await client.tokenize(TextPrompt("<|stop|>é"))
            assert await client.detokenize(ids) == "<|stop|>é"
            assert await client.vocabulary_entries(ids) == ["<|stop|>", "Ã", "©"]
            chat = ChatPrompt([{"role": "user", "content": "hi"}], add_generation_prompt=False)
            text = "<|start|>user: hi<|stop|>"
            assert await client.tokenize(chat) == await client.tokenize(TextPrompt(text))
            sampling = SamplingParams(max_tokens=None)
            one = GenerationRequest("r", chat, sampling, time.monotonic())
            rendered = (await client.render([one]))[0]
            assert rendered.prompt == text
            assert rendered.sampling.max_tokens == 512 - len(rendered.prompt_token_ids)
            assert rendered.sampling.seed is None
            with pytest.raises(InvalidRequestError, match="maximum context length"):
                await client.render([replace(one, prompt=TextPrompt("a" * 512))])
            with pytest.raises(InvalidRequestError, match="id 300, which is not") as refusal:
                await client.detokenize([300])
            assert refusal.value.param == "tokens"
            info = client.tokenizer_info()
            assert info["special_tokens"] == {"<|end|>": 256, "<|start|>": 257, "<|stop|>": 258}
            assert "generation_prompt" in info["chat_template"]
            assert client._requests.streams == {}  # nothing is computed

    play(scene)


class Witness:
    """Notes on which thread a tokenizer works."""

    def __init__(self, tokenizer: Any, threads: list[int]) -> None:
        self._tokenizer, self._threads = tokenizer, threads

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._threads.append(threading.get_ident())
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(("num_chars", "is_here"), [(100, True), (4096, True), (4097, False)])
def test_long_texts_are_tokenised_off_the_event_loop(
    tiny_model: Path, num_chars: int, is_here: bool
) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            threads: list[int] = []
            assert client._admission is not None
            client._admission.tokenizer = Witness(client._admission.tokenizer, threads)  # type: ignore[assignment]
            prompt = TextPrompt("a" * num_chars)
            await client.tokenize(prompt)
            with suppress(InvalidRequestError):  # the longer ones exceed the window
                await client.submit([GenerationRequest("r", prompt, SamplingParams(), 0.0)])
            assert [one == threading.get_ident() for one in threads] == [is_here, is_here]

    play(scene)


def test_a_callback_is_called_once_for_what_a_step_gave_all_its_streams(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            streams = await client.submit([request(f"r{i}", [i], 5) for i in range(3)])
            assert [stream.take() for stream in streams] == [None] * 3
            taken: list[list[list[int]]] = []  # at each call, from each stream

            def take_all() -> None:
                outputs = [stream.take() for stream in streams]
                taken.append([output.outputs[0].token_ids if output else [] for output in outputs])

            for stream in streams:
                stream.on_ready(take_all)
            await until(lambda: len(taken) == 5)
            assert taken == [[[i + k] for i in range(3)] for k in range(1, 6)]
            assert [stream.take() for stream in streams] == [None] * 3

    play(scene)


def test_those_who_take_hear_of_aborts_and_of_the_engines_end(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as client:
            await until(lambda: is_ready(client))
            aborted, left = await client.submit([request("a", [1], 400), request("b", [1], 400)])
            calls: list[str] = []
            aborted.on_ready(lambda: calls.append("a"))
            left.on_ready(lambda: calls.append("b"))
            aborted.abort()
            assert calls == ["a"]
            output = aborted.take()
            assert output is not None
            assert output.outputs[0].finish_reason is FinishReason.ABORT
            calls.clear()
            client._lives.current.process.kill()
            await until(lambda: client._death is not None)
            assert calls[-1] == "b"
            with pytest.raises(EngineDeadError):
                take_rest(left)

    play(scene)


def take_rest(stream: Any) -> None:
    while stream.take() is not None:
        pass
