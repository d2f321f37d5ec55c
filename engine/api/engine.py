"""The engine as its callers call it: requests in, streams of outputs back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .engine_info import EngineInfo, LoadProgress
from .kv_snapshot import KVSnapshot
from .output import RequestOutput
from .request import GenerationRequest, Prompt, RenderedRequest

if TYPE_CHECKING:
    from ..stats import EngineStats, StatsSink


class RequestStream(Protocol):
    """The outputs of one admitted request, in order. Ends after the one with ``finished``.

    Outputs that a slow reader has not taken are merged, so the buffer stays bounded by the request. There is
    one reader: it iterates, or takes what there is whenever it is told that there is something.

    Raises:
        EngineDeadError: from iteration and ``take``, when the engine ended before the request did.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def __anext__(self) -> RequestOutput: ...
    def take(self) -> RequestOutput | None:
        """What has come since the last time; ``None`` if nothing has. Waits for nothing."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called on the event loop whenever there is something to take, a failure too.

        A callback of several streams is called once for all that one step gave them. It must not raise.
        """

    def abort(self) -> None:
        """Stop computing. Waits for nothing, may be called at any time, any number of times."""


class Engine(Protocol):
    """A running engine, as the server sees it. All methods belong to one event loop."""

    async def start(self) -> None:
        """Attach to the running event loop. Called once, before anything else; does not wait."""

    @property
    def info(self) -> EngineInfo:
        """Limits and facts.

        Raises:
            EngineNotReadyError: the engine is still loading.
        """

    @property
    def progress(self) -> LoadProgress: ...

    def check_ready(self) -> None:
        """Return if requests are computed now.

        Raises:
            EngineNotReadyError: loading, being started again or shutting down.
            EngineDeadError: the engine ended.
        """

    def check_accepting(self) -> None:
        """Return if requests are accepted now: also while the engine is started again, for which they wait.

        Raises:
            EngineNotReadyError: loading or shutting down.
            EngineDeadError: the engine ended.
        """
        self.check_ready()

    @property
    def num_restarts(self) -> int:
        """How often an engine that had died or was stuck has been started again."""
        return 0

    def check_alive(self) -> None:
        """Return unless the engine ended for good.

        Raises:
            EngineDeadError: it did.
        """

    async def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[RequestStream]:
        """Admit requests, all or none, and start computing them.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; none of ``requests`` runs.
            OverloadedError: too much is queued.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def render(self, requests: Sequence[GenerationRequest]) -> list[RenderedRequest]:
        """Admit requests as :meth:`submit` does, and compute nothing.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any length, which may exceed the window.

        Raises:
            InvalidRequestError: it is not valid text, or a chat that the template cannot render.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens; special tokens show.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
            EngineNotReadyError, EngineDeadError: nothing is accepted now.
        """

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes these tokens, which is not always the text they stand for.

        Raises:
            EngineNotReadyError, EngineDeadError: there is no tokenizer to ask.
        """

    def tokenizer_info(self) -> Mapping[str, Any]:
        """Facts about the tokenizer, the chat template among them.

        Raises:
            EngineNotReadyError, EngineDeadError: there is no tokenizer to ask.
        """

    def stats(self) -> EngineStats | None:
        """The last snapshot, from memory; ``None`` before the first one."""

    def set_stats_sink(self, sink: StatsSink) -> None: ...

    async def kv_snapshot(self) -> KVSnapshot:
        """KV memory, asked of the engine between two steps.

        Raises:
            EngineNotReadyError, EngineDeadError: there is none to ask, or it ended before it answered.
        """

    async def reset_prefix_cache(self) -> None:
        """Forget every prefix, so that nothing computed so far is hit again. Running requests go on.

        Raises:
            EngineNotReadyError, EngineDeadError: there is no engine to tell.
        """

    async def wait_dead(self) -> None:
        """Return when the engine has ended for good, for any reason other than :meth:`close`."""

    async def close(self) -> None:
        """End every live request with ``FinishReason.ABORT``, then end the engine."""
