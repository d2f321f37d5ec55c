"""Stop strings in a stream of text.

Owns the text that may turn out to be the start of a stop string. Must not know tokens.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back no more than it must.

    The match that ends first wins; of several that end together, the longest. So the result does not
    depend on how the text is cut into pieces, and never waits for text behind a complete match. Held
    back is the longest end of the text that begins a stop string. Cost is linear in the text
    (Aho & Corasick, "Efficient string matching", CACM 1975).

    Args:
        stop: the stop strings, none of them empty.
        include_in_output: whether the text given out ends with the stop string or before it.
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool = False) -> None:
        self._automaton = _build(stop)
        self._includes = include_in_output
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            The text that is safe to give out, and the stop string if one is complete. What follows a
            match is dropped, also in later calls.
        """
        if self._matched is not None:
            return "", self._matched
        automaton = self._automaton
        if not self._state and automaton.first_chars.isdisjoint(text):
            return text, None
        text, start = self._held + text, len(self._held)
        for index in range(start, len(text)):
            self._state = automaton.step(self._state, text[index])
            stop = automaton.matches[self._state]
            if stop is not None:
                self._held, self._matched = "", stop
                end = index + 1
                return text[: end if self._includes else end - len(stop)], stop
        num_safe = len(text) - automaton.depths[self._state]
        self._held = text[num_safe:]
        return text[:num_safe], None

    def flush(self) -> str:
        """The held text, when nothing more will come. The matcher starts afresh behind it."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """All stop strings at once. State 0 is the root; a state is a beginning of some stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.first_chars = frozenset(text[0] for text in stop)
        self.matches: list[str | None] = [None]  # the longest stop string that ends in a state
        self.depths = [0]  # characters that a state stands for
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]  # the longest proper end of a state that is a state too
        for text in stop:
            self._add(text)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and char not in self._children[state]:
            state = self._fallbacks[state]
        return self._children[state].get(char, 0)

    def _add(self, text: str) -> None:
        state = 0
        for char in text:
            following = self._children[state].get(char)
            if following is None:
                following = len(self.depths)
                self._children[state][char] = following
                self._children.append({})
                self._fallbacks.append(0)
                self.matches.append(None)
                self.depths.append(self.depths[state] + 1)
            state = following
        self.matches[state] = text

    def _link(self) -> None:
        """Fallbacks and inherited matches, breadth first: a fallback is always shallower."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._children[state].items():
                self._fallbacks[child] = self.step(self._fallbacks[state], char)
                if self.matches[child] is None:
                    self.matches[child] = self.matches[self._fallbacks[child]]
                queue.append(child)


@lru_cache(maxsize=64)
def _build(stop: tuple[str, ...]) -> _Automaton:
    """Shared by the sequences of a request. An automaton is read only once built."""
    return _Automaton(stop)
