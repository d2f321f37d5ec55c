"""What a caller of the engine sees of an engine process that dies: nothing, if it can be helped."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from octavo.engine.api import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokensPrompt,
)
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.config.supervision import Supervision
from octavo.engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    OverloadedError,
)
from octavo.engine.service import engine_life, live_requests
from octavo.engine.service.client import EngineClient
from octavo.engine.stats import EngineStats, RequestRecord

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
POISON = 200  # the token upon which the fake engine dies, in mode "poison"


class Sink:
    """Adds the engine's counters up as the metrics do."""

    def __init__(self) -> None:
        self.last = EngineStats()
        self.past_generated = self.past_prompt = 0
        self.num_first_tokens = 0
        self.records: list[RequestRecord] = []

    def record_step(self, stats: EngineStats, num_step_tokens: int) -> None:
        self.record_stats(stats)

    def record_stats(self, stats: EngineStats) -> None:
        assert stats.epoch >= self.last.epoch
        if stats.epoch != self.last.epoch:
            self.past_generated += self.last.num_generation_tokens
            self.past_prompt += self.last.num_prompt_tokens
        self.last = stats

    @property
    def num_generated(self) -> int:
        return self.past_generated + self.last.num_generation_tokens

    @property
    def num_prompt(self) -> int:
        return self.past_prompt + self.last.num_prompt_tokens

    def record_first_token(self, ttft_s: float) -> None:
        self.num_first_tokens += 1

    def record_inter_token(self, itl_s: float) -> None:
        pass

    def record_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


@asynccontextmanager
async def running(
    model: Path, mode: str = "slow", supervision: Supervision | None = None, **options: Any
) -> AsyncIterator[tuple[EngineClient, Sink]]:
    """A client that is ready."""
    config = EngineConfig.from_options({"model": str(model), **options})
    command = [sys.executable, "-P", str(FAKE_ENGINE), mode]
    watched = supervision or Supervision()
    client = EngineClient(config, open_checkpoint(model), command, "critical", watched)
    sink = Sink()
    client.set_stats_sink(sink)
    await client.start()
    try:
        await until(lambda: is_ready(client))
        yield client, sink
    finally:
        await client.close()


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
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
    request_id: str, token_ids: list[int], max_tokens: int = 100, **params: Any
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return GenerationRequest(request_id, TokensPrompt(token_ids), sampling, time.monotonic())


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


class Read:
    """All that a stream gives, as it comes."""

    def __init__(self, stream: Any) -> None:
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.prompt_logprobs: list[Any] | None = None
        self.logprobs: list[Any] = []
        self.error: str | None = None
        self.last: Any = None
        self.done = asyncio.create_task(self._read(stream))

    @property
    def first(self) -> list[int]:
        return self.ids.get(0, [])

    async def _read(self, stream: Any) -> None:
        async for output in stream:
            for delta in output.outputs:
                assert delta.index not in self.ends
                self.ids.setdefault(delta.index, []).extend(delta.token_ids)
                self.logprobs += delta.logprobs or []
                if delta.finish_reason is not None:
                    self.ends[delta.index] = delta.finish_reason
            self.error = output.error or self.error
            self.last = output


def following(token_id: int, count: int) -> list[int]:
    """What the fake engine gives after ``token_id``."""
    return [(token_id + i) % 256 for i in range(1, count + 1)]


def kill(client: EngineClient) -> None:
    client._lives.current.process.kill()


async def submit(client: EngineClient, *requests: GenerationRequest) -> list[Read]:
    return [Read(stream) for stream in await client.submit(requests)]


def test_streams_go_on_in_another_engine_with_the_same_tokens(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as (client, sink):
            asked = [request(f"r{i}", [10 + i] * 20, 30 + i) for i in range(10)]  # eight seats
            reads = await submit(client, *asked)
            for num_tokens in (1, 12):
                await until(lambda n=num_tokens: min(len(r.first) for r in reads[:8]) >= n)  # type: ignore[misc]
                kill(client)
                await until(lambda: not is_ready(client))
                await until(lambda: is_ready(client))
            await asyncio.gather(*(read.done for read in reads))
            for i, read in enumerate(reads):
                assert read.first == following(10 + i, 30 + i)
                assert read.ends == {0: FinishReason.LENGTH}
            assert client.num_restarts == 2
            assert sink.num_first_tokens == 10
            assert [r.num_generation_tokens for r in sink.records] == [30 + i for i in range(10)]
            await until(lambda: sink.last.num_running == 0)
            assert sink.num_generated == sum(30 + i for i in range(10))
            assert sink.num_prompt == 10 * 20
            assert sink.last.num_used_blocks == 0

    play(scene)


def test_engines_that_die_again_and_again_still_bring_a_stream_to_its_end(
    tiny_model: Path,
) -> None:
    async def scene() -> None:
        # Killed once its tokens are here: those that a dying engine leaves behind are nobody's progress.
        async with running(tiny_model, "slow", Supervision(max_restarts=1)) as (client, _):
            (read,) = await submit(client, request("r", [1], 60))
            for num_deaths in range(1, 5):
                num_tokens = len(read.first)
                await until(lambda n=num_tokens: len(read.first) > n)  # type: ignore[misc]
                kill(client)
                await until(lambda n=num_deaths: client.num_restarts == n and is_ready(client))  # type: ignore[misc]
            await read.done
            assert read.error is None
            assert read.first == following(1, 60)

    play(scene)


def test_several_choices_go_on_each_from_where_it_was(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as (client, _):
            client_tokens = client._door().tokenizer.encode("A")
            asked = [
                request("n", client_tokens, 60, n=3, logprobs=1),
                request("stop", client_tokens, 60, n=2, stop=("FGH",)),
            ]
            reads = await submit(client, *asked)
            await until(lambda: len(reads[0].first) >= 3)
            kill(client)
            await asyncio.gather(*(read.done for read in reads))
            assert reads[0].ids == dict.fromkeys(range(3), following(client_tokens[0], 60))
            assert len(reads[0].logprobs) == 180
            assert reads[1].ends == dict.fromkeys(range(2), FinishReason.STOP)
            assert reads[1].ids == dict.fromkeys(range(2), following(client_tokens[0], 7))

    play(scene)


def test_ranked_choices_start_over_and_count_once(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as (client, sink):
            best = request("best", [1] * 3, 40, n=1, best_of=3)
            beams = request("beams", [50] * 3, 40, n=2, use_beam_search=True, temperature=0.0)
            twins = await submit(client, best, beams)
            await asyncio.gather(*(twin.done for twin in twins))
            num_steps = sink.last.num_steps
            reads = await submit(client, best, beams)
            await until(lambda: sink.last.num_steps > num_steps + 10)
            kill(client)
            await asyncio.gather(*(read.done for read in reads))
            for read, twin in zip(reads, twins, strict=True):
                assert read.ids == twin.ids
                assert read.ends == twin.ends
                assert read.last.num_discarded_tokens == twin.last.num_discarded_tokens
            assert client.num_restarts == 1
            assert len(reads[0].first) == 40

    play(scene)


def test_ranked_choices_that_come_farther_each_time_are_not_blamed(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow") as (client, _):
            (read,) = await submit(client, request("r", [1], 60, best_of=3, seed=1))
            state = client._requests.streams["r"].state
            for num_tokens in (3, 6, 9, 12):
                await until(lambda: len(state._sequences[0].token_ids) >= num_tokens)  # noqa: B023
                epoch = client._lives.current.epoch
                kill(client)
                await until(lambda: client._lives.current.epoch > epoch and is_ready(client))  # noqa: B023
            await read.done
            assert read.error is None
            assert read.first == following(1, 60)

    play(scene)


def test_requests_wait_while_there_is_no_engine_and_questions_are_refused(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "stuck-again") as (client, _):
            kill(client)
            await until(lambda: not is_ready(client))
            with pytest.raises(EngineNotReadyError, match="started again"):
                client.check_ready()
            client.check_alive()
            client.check_accepting()
            reads = await submit(client, request("r", [1], 4))
            for ask in (client.kv_snapshot, client.reset_prefix_cache):
                with pytest.raises(EngineNotReadyError, match="started again"):
                    await ask()
            await until(lambda: client.progress.stage == "loading")
            assert client.progress.fraction < 1
            assert await client.detokenize([65]) != ""
            await client.close()
            await reads[0].done
            assert reads[0].ends == {0: FinishReason.ABORT}

    play(scene)


def test_nothing_fails_between_an_engine_s_end_and_the_news_of_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_life, "LAST_FRAMES_S", 1.0)

    async def scene() -> None:
        async with running(tiny_model, "slow") as (client, _):
            old, left = await submit(client, request("old", [1], 40), request("left", [2], 40))
            await until(lambda: len(old.first) > 2)
            socket = client._lives.current.socket
            kill(client)
            await until(lambda: not socket.poll(0, zmq.POLLOUT))
            client.abort("left")
            (new,) = await submit(client, request("new", [3], 40))
            assert client.num_restarts == 0  # nothing is known yet
            await asyncio.gather(old.done, new.done, left.done)
            assert (old.first, new.first) == (following(1, 40), following(3, 40))
            assert left.ends == {0: FinishReason.ABORT}

    play(scene)


def test_a_new_request_is_computed_by_the_next_engine(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as (client, _):
            kill(client)
            await until(lambda: not is_ready(client))
            aborted, read = await submit(client, request("a", [1]), request("b", [1], 4))
            client.abort("a")
            await read.done
            assert read.first == following(1, 4)
            await aborted.done
            assert aborted.ends == {0: FinishReason.ABORT}
            assert len((await client.kv_snapshot()).sequences) == 0

    play(scene)


def test_a_question_to_an_engine_that_dies_is_not_answered_by_the_next(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as (client, _):
            psutil.Process(client._lives.current.process.pid).suspend()
            asked = asyncio.ensure_future(client.kv_snapshot())
            await asyncio.sleep(0.05)
            kill(client)
            with pytest.raises(EngineNotReadyError, match="started again"):
                await asked
            await until(lambda: is_ready(client))
            await client.kv_snapshot()

    play(scene)


def test_only_so_many_requests_wait_for_an_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_requests, "MAX_NEW_WHILE_AWAY", 3)

    async def scene() -> None:
        async with running(tiny_model) as (client, _):
            live = await submit(client, request("live", [1], 50))
            await until(lambda: len(live[0].first) > 0)
            kill(client)
            await until(lambda: not is_ready(client))
            reads = await submit(client, *(request(f"r{i}", [1], 4) for i in range(3)))
            with pytest.raises(OverloadedError, match="wait"):
                await client.submit([request("late", [1])])
            await asyncio.gather(*(read.done for read in live + reads))
            assert {len(read.first) for read in reads} == {4}
            assert len(await submit(client, *(request(f"s{i}", [1], 4) for i in range(9)))) == 9

    play(scene)


@pytest.mark.parametrize("how", ["stopped", "in a step"])
def test_a_stuck_engine_is_killed_and_streams_go_on(tiny_model: Path, how: str) -> None:
    supervision = Supervision(5, 3.0 if how == "stopped" else 1000.0, 3.0)

    async def scene() -> None:
        mode = "slow" if how == "stopped" else "hang"
        async with running(tiny_model, mode, supervision) as (client, _):
            process = client._lives.current.process
            (read,) = await submit(client, request("r", [1], 40))
            await until(lambda: len(read.first) >= 3)
            if how == "stopped":
                process.send_signal(signal.SIGSTOP)
            await read.done
            assert process.returncode == -signal.SIGKILL
            assert read.first == following(1, 40)

    play(scene)


def test_the_poisoned_request_alone_gets_an_error(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "poison,slow") as (client, sink):
            reads = await submit(
                client,
                request("a", [1], 60),
                request("poison", [POISON - 20], 60),
                request("b", [100], 60),
            )
            await asyncio.gather(*(read.done for read in reads))
            assert reads[1].first == following(POISON - 20, 19)
            assert reads[1].ends == {0: FinishReason.ERROR}
            assert reads[1].error is not None
            for read, begin in ((reads[0], 1), (reads[2], 100)):
                assert read.first == following(begin, 60)
                assert read.error is None
            reasons = sorted(record.finish_reason for record in sink.records)
            assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
            assert client.num_restarts >= 3
            assert not client._supervisor.is_isolating

    play(scene)


def test_a_poisoned_prompt_is_found_among_requests_that_gain_tokens(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "poison,slow") as (client, _):
            # Its prompt takes several steps, in which the others gain tokens.
            poison = request("poison", [POISON - 1] * 300, 60)
            reads = await submit(client, request("a", [1], 120), poison, request("b", [70], 120))
            await asyncio.gather(*(read.done for read in reads))
            assert reads[0].first == following(1, 120)
            assert reads[1].ends == {0: FinishReason.ERROR}
            assert reads[2].first == following(70, 120)
            assert client.num_restarts < 8

    play(scene)


@pytest.mark.parametrize(
    "params", [{"best_of": 2}, {"use_beam_search": True, "best_of": 2, "temperature": 0.0}]
)
def test_poisoned_ranked_choices_end_with_an_error(
    tiny_model: Path, params: dict[str, Any]
) -> None:
    async def scene() -> None:
        async with running(tiny_model, "poison,slow") as (client, _):
            reads = await submit(
                client, request("poison", [POISON - 5], 60, **params), request("a", [1], 90)
            )
            await asyncio.gather(*(read.done for read in reads))
            assert set(reads[0].ends.values()) == {FinishReason.ERROR}
            assert reads[1].first == following(1, 90)
            client.check_alive()

    play(scene)


def test_too_many_deaths_in_vain_are_the_end(tiny_model: Path) -> None:
    async def scene() -> None:
        supervision = Supervision(max_restarts=2)
        async with running(tiny_model, "stuck-again", supervision) as (client, _):
            (read,) = await submit(client, request("r", [1], 400))
            for num_restarts in (1, 2):
                kill(client)
                await until(lambda n=num_restarts: client.num_restarts == n)  # type: ignore[misc]
                await until(lambda: client.progress.stage == "loading")
                client.check_alive()
            kill(client)
            with pytest.raises(EngineDeadError, match="signal 9"):
                await read.done
            await asyncio.wait_for(client.wait_dead(), 10)
            for check in (client.check_alive, client.check_ready, client.check_accepting):
                with pytest.raises(EngineDeadError):
                    check()
            with pytest.raises(EngineDeadError):
                await client.submit([request("late", [1])])

    play(scene)


def test_what_another_engine_refuses_for_now_is_tried_again(tiny_model: Path) -> None:
    """A volume that is away, or memory that the dead one has not given back yet."""

    async def scene() -> None:
        async with running(tiny_model, "unloadable-again") as (client, _):
            (read,) = await submit(client, request("r", [1], 400))
            kill(client)
            await read.done
            assert client.num_restarts == 2
            assert read.first == following(1, 400)

    play(scene)


def test_closing_while_an_engine_is_started_again_ends_everything(tiny_model: Path) -> None:
    before = psutil.Process().children()

    async def scene() -> None:
        for is_loading in (False, True):
            async with running(tiny_model, "stuck-again") as (client, _):
                (read,) = await submit(client, request("r", [1], 400))
                kill(client)
                await until(lambda: client.num_restarts == 1)
                if is_loading:
                    await until(lambda: client.progress.stage == "loading")
                await client.close()
                await read.done
                assert read.ends == {0: FinishReason.ABORT}
                assert client._lives._restarting is not None
                assert client._lives._restarting.done()  # no other engine will be started
                assert psutil.Process().children() == before

    play(scene)


def test_a_start_that_fails_is_tried_again(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as (client, _):
            (read,) = await submit(client, request("r", [1], 40))
            await until(lambda: len(read.first) > 0)
            command, client._lives._command = client._lives._command, ["/nonexistent"]
            kill(client)
            await until(lambda: client._supervisor._num_in_vain == 2)
            client._lives._command = command
            await read.done
            assert read.first == following(1, 40)

    play(scene)


def test_gauges_are_empty_while_there_is_no_engine(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow,stuck-again") as (client, sink):
            (read,) = await submit(client, request("r", [1], 400))
            await until(lambda: len(read.first) > 2 and sink.last.num_running == 1)
            kill(client)
            await until(lambda: client.num_restarts == 1)
            assert (sink.last.num_running, sink.last.num_waiting) == (0, 1)
            assert sink.last.num_used_blocks == 0
            assert sink.num_generated == len(read.first)

    play(scene)
