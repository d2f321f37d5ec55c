"""Answers to flags that octavo does not have."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from ..engine.config.options import flag_of
from .peer_flags import PEER_FLAGS


def unknown_option(argument: str, option_names: Sequence[str]) -> str:
    """One sentence on an argument that is not a flag here.

    A flag that other servers have is answered by name; for any other the nearest of octavo's is
    suggested. What follows a ``=`` is never repeated: it may be a secret.
    """
    flag = argument.partition("=")[0]
    answer = PEER_FLAGS.get(flag) or PEER_FLAGS.get(flag.replace("--no-", "--", 1))
    if answer is not None:
        return f"{flag} is not offered: {answer}."
    near = get_close_matches(flag, [flag_of(name) for name in option_names], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "see octavo serve --help."
    return f"{flag} is not an option; {hint}"
