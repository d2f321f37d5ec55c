"""Prefixes that one tenant has computed are not found by another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.service.test_client import is_ready, play, request, running, until

PROMPT = [1] * 100


def test_no_hit_across_tenants_whatever_the_salt(tiny_model: Path) -> None:
    async def scene() -> None:
        async with running(tiny_model) as client:
            await until(lambda: is_ready(client))
            cached = {}
            for turn in (0, 1):
                for tenant, salt in ((None, None), ("ann", None), ("bob", None), ("bob", "ann")):
                    one = request(f"{turn}-{tenant}-{salt}", PROMPT)
                    one = replace(one, tenant=tenant, cache_salt=salt)
                    (stream,) = await client.submit([one])
                    async for output in stream:
                        cached[turn, tenant, salt] = output.num_cached_tokens
            assert {n for (turn, *_), n in cached.items() if turn == 0} == {0}
            assert min(n for (turn, *_), n in cached.items() if turn == 1) > 80

    play(scene)
