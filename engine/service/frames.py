"""What travels between the front end and the engine process: msgpack, typed, never pickle.

Every frame is one message on a PAIR socket of one engine life. Prompts and resumed outputs travel as
packed little-endian uint32; everything else as msgpack arrays.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

from ..api import EngineInfo, KVSnapshot, PoolingParams, ResumedSequence, SamplingParams
from ..scheduling.request import NewRequest, SequenceUpdate
from ..stats import EngineStats


class WireRequest(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`NewRequest` with packed ids."""

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    seed: int
    arrival_time: float
    priority: int
    cache_salt: str | None
    resume: tuple[tuple[bytes, bool], ...]
    pooling: PoolingParams | None = None
    tenant: str | None = None
    weight: float = 1.0


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Front end → engine: requests that were submitted together."""

    requests: tuple[WireRequest, ...]


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Front end → engine: nobody wants these any more."""

    request_ids: tuple[str, ...] = ()
    sequences: tuple[tuple[str, int], ...] = ()  # (request id, child index), where others go on


class KVSnapshotRequest(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Front end → engine: describe the KV memory between two steps."""

    question_id: int


class ResetPrefixCache(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Front end → engine: forget every cached prefix."""

    question_id: int


class Loading(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → front end: how far the start has come."""

    stage: str
    fraction: float


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → front end: ready. Carries every limit that the door checks."""

    info: EngineInfo


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → front end: what one step gave all its sequences."""

    updates: list[SequenceUpdate]
    num_step_tokens: int
    stats: EngineStats


class Snapshot(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → front end: state that changed without a step (an abort while idle)."""

    stats: EngineStats


class Answer(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → front end: to a KVSnapshotRequest, or (with no snapshot) that a reset is done."""

    question_id: int
    snapshot: KVSnapshot | None = None


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → front end, the last frame: why it ends. One sentence for people."""

    message: str
    is_refusal: bool = False  # options or checkpoint cannot work


ToEngine = Add | Abort | KVSnapshotRequest | ResetPrefixCache
FromEngine = Loading | Hello | Step | Snapshot | Answer | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(frame)


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode and check a frame from the front end.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode and check a frame from the engine.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _from_engine.decode(data)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def to_wire(new: NewRequest) -> WireRequest:
    return WireRequest(
        new.request_id,
        pack_ids(new.prompt_token_ids),
        new.sampling,
        new.seed,
        new.arrival_time,
        new.priority,
        new.cache_salt,
        tuple((pack_ids(r.output_token_ids), r.is_finished) for r in new.resume),
        new.pooling,
        new.tenant,
        new.weight,
    )


def from_wire(wire: WireRequest) -> NewRequest:
    return NewRequest(
        wire.request_id,
        unpack_ids(wire.prompt),
        wire.sampling,
        wire.seed,
        wire.arrival_time,
        wire.priority,
        wire.cache_salt,
        tuple(ResumedSequence(tuple(unpack_ids(ids)), done) for ids, done in wire.resume),
        wire.pooling,
        wire.tenant,
        wire.weight,
    )
