"""Fair shares among tenants: start-time fair queueing, with tokens as the currency.

Each request gets a start tag: where its tenant's earlier requests end on a clock that all tenants share, but
not before the tag of the request that began last. What it costs, its prompt and all that it may generate, over the
tenant's weight, is how far its tenant's next tag lies behind. The lowest tag goes first. A tenant who was away
saves nothing up, and one who sends much waits behind others' few; none waits for ever. (P. Goyal, H. Vin, H. Cheng:
Start-time Fair Queuing, SIGCOMM 1996.)

A request is charged for all that it may generate when it comes. What it did not use is given back when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import NewRequest, Request

SCALE = 1 << 20
"""Ticks of the clock for a token of weight 1: tags are integers."""


@dataclass(slots=True)
class _Account:
    """A tenant who has requests, or had some lately."""

    next_tag: int
    last_tag: int  # of its requests; they keep their order


class FairShare:
    """The clock, and what each tenant has used of it. There are as many tenants as there are names of keys."""

    def __init__(self) -> None:
        self._now = 0
        self._accounts: dict[str | None, _Account] = {}

    def tag(self, new: NewRequest) -> int:
        """The start tag of a request that has just come."""
        account = self._accounts.get(new.tenant)
        tag = self._now if account is None else max(self._now, account.next_tag)
        self._accounts[new.tenant] = _Account(tag + _ticks(new, _most_tokens(new)), tag)
        return tag

    def begun(self, tag: int) -> None:
        """The request with this tag runs."""
        self._now = max(self._now, tag)

    def ended(self, request: Request) -> None:
        """Give back what the request did not use."""
        account = self._accounts.get(request.new.tenant)
        if account is None:
            return
        unused = max(0, _most_tokens(request.new) - _used_tokens(request))
        account.next_tag = max(account.last_tag, account.next_tag - _ticks(request.new, unused))
        if account.next_tag <= self._now:
            del self._accounts[request.new.tenant]


def _ticks(new: NewRequest, num_tokens: int) -> int:
    return int(num_tokens * SCALE / new.weight)


def _most_tokens(new: NewRequest) -> int:
    sampling = new.sampling
    return len(new.prompt_token_ids) + (sampling.max_tokens or 0) * sampling.num_sequences


def _used_tokens(request: Request) -> int:
    outputs = sum(len(s.token_ids) - s.num_prompt_tokens for s in request.sequences)
    return request.num_counted_prompt_tokens + outputs
