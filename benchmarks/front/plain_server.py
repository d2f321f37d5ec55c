"""The front end that is written first: FastAPI, pydantic, one event per token: ``plain_server.py PORT STEP_MS [own]``.

Its tokens come from an engine process, a message for each; with ``own`` from a task of its own loop, as if an
engine could share the process.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
import zmq
import zmq.asyncio
from canned_engine import TOKEN_IDS
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from octavo.engine.build import find_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.text.tokenizer import load_tokenizer

PORT, STEP_S = int(sys.argv[1]), float(sys.argv[2]) / 1000
TOKENIZER = load_tokenizer(find_checkpoint(EngineConfig()))


class CompletionRequest(BaseModel):
    model: str
    prompt: str | list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    ignore_eos: bool = False
    stream: bool = False


class Choice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Chunk(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]


class OwnSteps:
    """Gives every running request a token a step."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[int]] = {}

    async def add(self, name: str, _max_tokens: int) -> asyncio.Queue[int]:
        queue = self.queues[name] = asyncio.Queue()
        return queue

    async def run(self) -> None:
        tick, step = time.monotonic(), 0
        while True:
            tick = max(tick + STEP_S, time.monotonic())
            await asyncio.sleep(tick - time.monotonic())
            for queue in self.queues.values():
                queue.put_nowait(TOKEN_IDS[step % len(TOKEN_IDS)])
            step += 1


class ProcessSteps(OwnSteps):
    """Receives every token from the engine process."""

    def __init__(self) -> None:
        super().__init__()
        self._socket = zmq.asyncio.Context().socket(zmq.PAIR)
        self._socket.set_hwm(0)

    async def add(self, name: str, max_tokens: int) -> asyncio.Queue[int]:
        queue = await super().add(name, max_tokens)
        await self._socket.send_json({"id": name, "max_tokens": max_tokens})
        return queue

    async def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            endpoint = f"ipc://{folder}/engine"
            self._socket.bind(endpoint)
            script = str(Path(__file__).with_name("plain_engine.py"))
            command = [sys.executable, "-P", script, endpoint, sys.argv[2]]
            engine = await asyncio.create_subprocess_exec(*command)
            try:
                while True:
                    message = await self._socket.recv_json()
                    self.queues[message["id"]].put_nowait(message["token"])
            finally:
                engine.kill()


STEPS = OwnSteps() if "own" in sys.argv else ProcessSteps()


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(STEPS.run())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/v1/completions")
async def complete(request: CompletionRequest) -> StreamingResponse:
    if isinstance(request.prompt, str):
        TOKENIZER.encode(request.prompt)
    return StreamingResponse(events(request), media_type="text/event-stream")


async def events(request: CompletionRequest) -> AsyncIterator[str]:
    name, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    queue = await STEPS.add(name, request.max_tokens)
    try:
        for i in range(request.max_tokens):
            text = TOKENIZER.decode([await queue.get()])
            reason = "length" if i == request.max_tokens - 1 else None
            choice = Choice(index=0, text=text, finish_reason=reason)
            chunk = Chunk(id=name, created=created, model=request.model, choices=[choice])
            yield f"data: {chunk.model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        del STEPS.queues[name]


if __name__ == "__main__":
    uvicorn.run(app, port=PORT, log_level="warning", access_log=False)
