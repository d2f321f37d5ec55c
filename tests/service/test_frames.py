from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.api import (
    EngineInfo,
    FinishReason,
    KVBlock,
    KVSequence,
    KVSnapshot,
    PoolingParams,
    ResumedSequence,
    SamplingParams,
)
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.service.frames import (
    Abort,
    Add,
    Answer,
    Failed,
    Hello,
    KVSnapshotRequest,
    Loading,
    ResetPrefixCache,
    Snapshot,
    Step,
    decode_from_engine,
    decode_to_engine,
    encode,
    from_wire,
    pack_ids,
    to_wire,
    unpack_ids,
)
from octavo.engine.stats import EngineStats, HistogramCounts
from octavo.engine.step import SampleLogprobs

INFO = EngineInfo(
    "m",
    "A",
    10,
    20,
    (1, 2),
    16,
    4,
    100,
    8,
    64,
    "float32",
    "cpu",
    "torch",
    2,
    5,
    0.5,
    3,
    False,
    {"top_p": 0.9},
)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_ids(packed) == ids


def test_ids_are_little_endian() -> None:
    assert pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_request_crosses_whole() -> None:
    new = NewRequest(
        "id",
        [1, 49151],
        SamplingParams(stop=["a", "b"], logit_bias={3: -100.0}, stop_token_ids=[5], seed=7),  # type: ignore[arg-type]
        2**63 - 1,
        12.5,
        3,
        "salt",
        (ResumedSequence((4, 5), True), ResumedSequence((), False)),
        PoolingParams("mean", 7, normalize=False),
    )
    frame = decode_to_engine(encode(Add((to_wire(new),))))
    assert isinstance(frame, Add)
    assert from_wire(frame.requests[0]) == new


@pytest.mark.parametrize(
    "frame", [Abort(("a", "b"), (("c", 1),)), KVSnapshotRequest(3), ResetPrefixCache(2**40)]
)
def test_orders_and_questions_cross(frame: Abort | KVSnapshotRequest | ResetPrefixCache) -> None:
    assert decode_to_engine(encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        Loading("packing", 0.5),
        Hello(INFO),
        Failed("why"),
        Snapshot(EngineStats(num_running=3)),
        Snapshot(EngineStats(block_lifetimes=HistogramCounts((1,) * 22, 0.5))),
        Answer(7),
        Answer(
            8,
            KVSnapshot(
                4,
                16,
                (KVBlock(0, 2, 16, True, (1, 2)),),
                (KVSequence("r", 1, "running", 16, (0,)),),
            ),
        ),
        Step(
            [
                SequenceUpdate("r", 0, (5,), num_cached_tokens=32, cumulative_logprob=-1.5),
                SequenceUpdate("e", 0, (), FinishReason.STOP, embedding=b"\0\0\x80\x3f"),
                SequenceUpdate(
                    "s",
                    1,
                    (5,),
                    FinishReason.STOP,
                    7,
                    1.5,
                    2,
                    (SampleLogprobs(-0.5, 1, ((5, -0.5), (6, -1.0))),),
                ),
            ],
            9,
            EngineStats(epoch=2),
        ),
    ],
)
def test_reports_cross(frame: Loading | Hello | Failed | Snapshot | Step | Answer) -> None:
    assert decode_from_engine(encode(frame)) == frame


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\x91\xa3Foo", encode(Failed("x"))])
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(data)
