"""How many blocks sequences hold at most, over all KV groups: plain arithmetic, for whoever promises room.

A group without a window holds all blocks of a sequence. One with a window holds those that the last
``window`` computed tokens lie in, and those of the tokens that a step computes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


def first_block(num_tokens: int, window: int | None, block_size: int) -> int:
    """Table index of the first block that a sequence of ``num_tokens`` computed tokens needs.

    That is one token more than the next query sees: after a hit of a whole prompt, the last token is
    computed once more.
    """
    return 0 if window is None else max(0, num_tokens - window) // block_size


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """Upper bounds on blocks held. Over what a lone request holds they are never exceeded."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)  # per KV group
    max_step_tokens: int = 0  # of all sequences; matters where there are windows

    def in_window(self, window: int, num_sequences: int) -> int:
        """Blocks of one windowed group, however long the sequences are.

        ``window + n`` neighbouring tokens, with a hit inside a block before them, lie in at most
        ``ceil(window / b) + ceil(n / b) + 2`` blocks; the ``n`` of all sequences are one step's.
        """
        each = _ceil_div(window, self.block_size) + 2
        return num_sequences * each + _ceil_div(self.max_step_tokens, self.block_size)

    def of_sequence(self, num_tokens: int) -> int:
        return self.of_request(num_tokens, 0, 1)

    def of_request(
        self, num_prompt_tokens: int, max_tokens: int, n: int, *, is_beam_search: bool = False
    ) -> int:
        """A prompt with ``n`` continuations: full prompt blocks are shared, the rest is not.

        Beams need one more each: while they split, a block and its copy are both there.
        """
        shared = num_prompt_tokens // self.block_size
        own = _ceil_div(num_prompt_tokens + max_tokens, self.block_size) - shared
        whole = shared + n * own
        held = sum(
            whole if window is None else min(whole, self.in_window(window, n))
            for window in self.windows
        )
        return held + (n * len(self.windows) if is_beam_search else 0)

    def longest_sequence(self, num_blocks: int, most: int) -> int:
        """Tokens of the longest sequence, up to ``most``, that ``num_blocks`` hold."""
        return bisect_right(range(1, most + 1), num_blocks, key=self.of_sequence)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
