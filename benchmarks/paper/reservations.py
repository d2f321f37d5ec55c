"""Contiguous KV memory, as systems before paging had it: each request reserves one piece for its whole life.

A buddy allocator hands the pieces out, as in the paper's own version of Orca (Kwon et al., section 6.1). Requests are
served first come first served; the queue is never empty while anything is measured. Prompts are computed
in the step of their admission, so that only memory limits the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .lengths import MAX_MODEL_LEN, Lengths

Reservation = Callable[[Lengths], int]


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def oracle(one: Lengths) -> int:
    """The output's length is known."""
    return one.num_prompt_tokens + one.num_output_tokens


def pow2(one: Lengths) -> int:
    """The output's length is overestimated by at most a factor of two."""
    return min(one.num_prompt_tokens + next_power_of_two(one.num_output_tokens), MAX_MODEL_LEN)


def longest(_: Lengths) -> int:
    """Every output may be as long as the model allows."""
    return MAX_MODEL_LEN


class BuddyAllocator:
    """Pieces of power-of-two sizes, split in halves on demand and joined with their other half when free."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self._free.setdefault(1 << bit, set()).add(start)
                start += 1 << bit

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """A piece ``(start, size)``, or ``None``."""
        size = next_power_of_two(num_slots)
        fitting = [s for s, starts in self._free.items() if starts and s >= size]
        if not fitting:
            return None
        have = min(fitting)
        start = min(self._free[have])
        self._free[have].remove(start)
        while have > size:
            have //= 2
            self._free.setdefault(have, set()).add(start + have)
        return start, size

    def release(self, start: int, size: int) -> None:
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = start & ~size, size * 2
        self._free.setdefault(size, set()).add(start)


@dataclass
class Usage:
    """Averages over the steps that were measured."""

    num_running: float
    token_share: float  # of the whole pool: slots that hold a token
    later_share: float  # kept for tokens that will come
    never_share: float  # reserved for tokens that will never come
    outside_share: float  # rounded up by the allocator, or free and of no use


def simulate(
    stream: Sequence[Lengths], num_slots: int, reserve: Reservation, warm_share: float
) -> Usage:
    """Serve ``stream``; measure from when ``warm_share`` of it has finished to when nothing waits."""
    buddies = BuddyAllocator(num_slots)
    ends: list[tuple[int, int, tuple[int, int]]] = []  # last step, request, piece
    step = position = held = num_finished = 0
    final = reserved = 0  # slots that running requests will have filled, and that they reserved
    sums = [0, 0, 0, 0]
    num_measured = 0
    while position < len(stream):
        while position < len(stream):
            one = stream[position]
            piece = buddies.allocate(reserve(one))
            if piece is None:
                break
            heappush(ends, (step + one.num_output_tokens - 1, position, piece))
            held += one.num_prompt_tokens - 1
            final += oracle(one)
            reserved += reserve(one)
            position += 1
        held += len(ends)
        if num_finished >= warm_share * len(stream) and position < len(stream):
            num_measured += 1
            for i, value in enumerate((len(ends), held, final, reserved)):
                sums[i] += value
        while ends and ends[0][0] == step:
            _, done, piece = heappop(ends)
            buddies.release(*piece)
            held -= stream[done].num_prompt_tokens + stream[done].num_output_tokens - 1
            final -= oracle(stream[done])
            reserved -= reserve(stream[done])
            num_finished += 1
        step += 1
    running, tokens, filled, taken = (total / max(1, num_measured) for total in sums)
    return Usage(
        running,
        tokens / num_slots,
        (filled - tokens) / num_slots,
        (taken - filled) / num_slots,
        1 - taken / num_slots,
    )
