"""What may wait, and that nothing remains of what may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.errors import InvalidRequestError, OverloadedError
from tests.service.test_client import collect, is_ready, play, request, running, until

NUM_SEATS = 8  # of the fake engine


def test_a_full_queue_refuses_and_keeps_nothing(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow", max_num_queued_reqs=2) as client:
            await until(lambda: is_ready(client))
            long = [request(f"l{i}", [1], 200) for i in range(NUM_SEATS)]
            streams = list(await client.submit(long))  # a burst that finds seats is no queue
            streams += await client.submit([request("w0", [1]), request("w1", [1])])
            with pytest.raises(OverloadedError, match="--max-num-queued-reqs") as refusal:
                await client.submit([request("refused", [1])])
            assert refusal.value.reason == "max_num_queued_reqs"
            assert refusal.value.retry_after_s >= 0
            assert "refused" not in client._requests.streams
            snapshot = await client.kv_snapshot()
            assert {s.request_id for s in snapshot.sequences} == {s.request_id for s in streams}
            for stream in streams[:NUM_SEATS]:
                stream.abort()
            for stream in streams[NUM_SEATS:]:
                assert len((await collect(stream))[0]) == 4
            await client.submit([request("refused", [1])])

    play(scene)


def test_tokens_that_wait_are_bounded_too(tiny_model: Path) -> None:
    async def scene() -> None:
        options = {"max_num_queued_tokens": 40}
        async with running(tiny_model, "slow", **options) as client:
            await until(lambda: is_ready(client))
            await client.submit([request("big", [1] * 100, 50, n=NUM_SEATS)])  # has all seats
            await client.submit([request("w0", [1] * 30)])
            with pytest.raises(OverloadedError, match="--max-num-queued-tokens") as refusal:
                await client.submit([request("w1", [1] * 11)])
            assert refusal.value.reason == "max_num_queued_tokens"
            await client.submit([request("w1", [1] * 10)])

    play(scene)


def test_those_that_run_and_have_no_token_yet_do_not_wait(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, "slow", max_num_queued_reqs=0) as client:
            await until(lambda: is_ready(client))
            (stream,) = await client.submit([request("r", [1] * 400, 4, n=NUM_SEATS)])
            await until(lambda: stream.state.metrics.scheduled_time is not None)
            assert stream.state.metrics.first_token_time is None
            with pytest.raises(OverloadedError):
                await client.submit([request("w", [1])])

    play(scene)


def test_a_call_that_could_never_wait_is_wrong(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model, max_num_queued_reqs=2) as client:
            await until(lambda: is_ready(client))
            several = [request(f"r{i}", [1]) for i in range(NUM_SEATS + 3)]
            with pytest.raises(InvalidRequestError, match="3 requests would have to wait"):
                await client.submit(several)
            assert not client._requests.streams
            await client.submit(several[1:])

    play(scene)
