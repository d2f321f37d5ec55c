"""Kinds of requests, each with what it has cost, as the client counts it."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WINDOW = 512
SHARED = [17 + i % 200 for i in range(96)]
"""A prefix that many prompts have."""


@dataclass
class Count:
    """What the clients were told."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_answers: int = 0
    num_refusals: int = 0  # 429, asked again later
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, usage: dict[str, int]) -> None:
        self.num_prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.num_generation_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


class Client:
    """Asks one server. Every method is one request with its checks."""

    def __init__(self, url: str, http: httpx.AsyncClient, chance: random.Random) -> None:
        self.url, self.count = url, Count()
        self._http, self._chance = http, chance

    async def ask(self, kind: Callable[[Client], Awaitable[None]]) -> None:
        await kind(self)
        self.count.num_answers += 1
        name = kind.__name__
        self.count.kinds[name] = self.count.kinds.get(name, 0) + 1

    # Requests whose tokens are counted alike on both sides.

    async def streamed(self) -> None:
        body = self._drawn(stream=True, stream_options={"include_usage": True})
        self.count.add(await self._stream("/v1/completions", body))

    async def whole(self) -> None:
        await self._whole("/v1/completions", self._drawn())

    async def several(self) -> None:
        await self._whole("/v1/completions", self._drawn(n=3))

    async def shared_prefix(self) -> None:
        own = self._ids(self._chance.randint(1, 24))
        await self._whole("/v1/completions", self._drawn(prompt=[*SHARED, *own]))

    async def long_prompt(self) -> None:
        body = self._drawn(prompt=self._ids(WINDOW - 80), max_tokens=4, logprobs=2)
        await self._whole("/v1/completions", body)

    async def chat(self) -> None:
        body = {**self._drawn(), "messages": [{"role": "user", "content": "x" * 20}]}
        body.pop("prompt")
        usage = await self._stream(
            "/v1/chat/completions",
            {**body, "stream": True, "stream_options": {"include_usage": True}},
        )
        self.count.add(usage)

    async def responses(self) -> None:
        """One, and another that continues it."""
        body = {"input": "y" * 20, "max_output_tokens": 8, "seed": self._seed(), "ignore_eos": True}
        first = await self._whole("/v1/responses", body)
        await self._whole("/v1/responses", {**body, "previous_response_id": first["id"]})

    async def embeddings(self) -> None:
        await self._whole("/v1/embeddings", {"input": [self._ids(40), self._ids(9)]})

    # Requests that cost what only the server knows, or nothing.

    async def beams(self) -> None:
        body = self._drawn(n=2, use_beam_search=True, temperature=0, max_tokens=12)
        await self._whole("/v1/completions", {k: v for k, v in body.items() if k != "seed"})

    async def best_of(self) -> None:
        await self._whole("/v1/completions", self._drawn(n=2, best_of=4))

    async def stop_string(self) -> None:
        await self._whole("/v1/completions", self._drawn(stop=["e", "th"], ignore_eos=False))

    async def bad(self) -> None:
        wrong: list[tuple[int, dict[str, Any]]] = [
            (400, self._drawn(temperature=-1)),
            (400, self._drawn(prompt=self._ids(WINDOW + 1))),
            (404, self._drawn(model="nobody")),
            (400, self._drawn(n=10_000)),
        ]
        status, body = self._chance.choice(wrong)
        answer = await self._http.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code in (status, 429), answer.text

    async def abandoned(self) -> None:
        """The client goes away in the middle of a stream, with a reset."""
        body = self._drawn(stream=True, max_tokens=300)
        reader, writer = await self._connect(body)
        await reader.read(self._chance.choice((1, 300, 3000)))
        await asyncio.sleep(self._chance.uniform(0, 0.05))
        self._reset(writer)

    async def unfinished(self) -> None:
        """The client goes away in the middle of its body."""
        _, writer = await self._connect(self._drawn(), missing=10)
        self._reset(writer)

    async def _connect(
        self, body: dict[str, Any], missing: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content[: len(content) - missing])
        return reader, writer

    @staticmethod
    def _reset(writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
        writer.close()

    def _drawn(self, **fields: Any) -> dict[str, Any]:
        usual = {
            "prompt": self._ids(self._chance.randint(1, 60)),
            "max_tokens": self._chance.randint(2, 60),
            "seed": self._seed(),
            "ignore_eos": True,
        }
        return {**usual, **fields}

    def _ids(self, number: int) -> list[int]:
        return [self._chance.randrange(250) for _ in range(number)]

    def _seed(self) -> int:
        return self._chance.randrange(1 << 30)

    async def _whole(self, path: str, body: dict[str, Any]) -> Any:
        while True:
            answer = await self._http.post(f"{self.url}{path}", json=body)
            if answer.status_code != 429:
                break
            self.count.num_refusals += 1
            await asyncio.sleep(0.1)
        assert answer.status_code == 200, answer.text
        self.count.add(answer.json()["usage"])
        return answer.json()

    async def _stream(self, path: str, body: dict[str, Any]) -> dict[str, int]:
        """Returns the usage."""
        lines: list[str] = []
        while not lines:
            async with self._http.stream("POST", f"{self.url}{path}", json=body) as answer:
                if answer.status_code != 429:
                    assert answer.status_code == 200, await answer.aread()
                    lines = [line async for line in answer.aiter_lines() if line]
            if not lines:
                self.count.num_refusals += 1
                await asyncio.sleep(0.1)
        assert lines.pop() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert not any("error" in event for event in events), events[-1]
        usage: dict[str, int] = events[-1]["usage"]
        return usage


EXACT = [
    Client.streamed,
    Client.whole,
    Client.several,
    Client.shared_prefix,
    Client.long_prompt,
    Client.chat,
    Client.responses,
]
"""Whose tokens are counted alike, whatever happens to engines."""

WILD = [
    *EXACT,
    Client.embeddings,
    Client.beams,
    Client.best_of,
    Client.stop_string,
    Client.bad,
    Client.abandoned,
    Client.unfinished,
]
