"""``truncation: "auto"``: a conversation without its oldest turns, so that it fits the window.

A turn begins with a message of the user. Instructions stay, and so do the system's messages before the
first turn and the last turn. The fewest turns are dropped that leave room for the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..engine.api import ChatPrompt, Engine
from .responses_items import Item


async def fitted(
    engine: Engine,
    items: Sequence[Item],
    prompt_of: Callable[[Sequence[Item]], ChatPrompt],
    num_output_tokens: int,
) -> Sequence[Item]:
    """What of ``items`` fits, or the last turn if nothing does: then the engine refuses it with the numbers.

    Args:
        engine: Tokenises.
        items: A conversation, without instructions.
        prompt_of: Makes the prompt of a part of it.
        num_output_tokens: Room to leave.

    Raises:
        InvalidRequestError: the chat template cannot render a part of it.
    """
    room = engine.info.max_model_len - num_output_tokens

    async def fits(part: Sequence[Item]) -> bool:
        return len(await engine.tokenize(prompt_of(part))) <= room

    head, starts = _turns(items)
    if not starts or await fits(items):
        return items
    least, most = 0, len(starts) - 1  # of the starts; the last one is taken if none before it fits
    while least < most:
        middle = (least + most) // 2
        if await fits([*head, *items[starts[middle] :]]):
            most = middle
        else:
            least = middle + 1
    return [*head, *items[starts[least] :]]


def _turns(items: Sequence[Item]) -> tuple[Sequence[Item], list[int]]:
    """What always stays at the front, and where each turn but the first begins."""
    is_system = [item.role in ("system", "developer") for item in items]
    num_kept = is_system.index(False) if False in is_system else len(items)
    starts = [i for i in range(num_kept + 1, len(items)) if items[i].role == "user"]
    return items[:num_kept], starts
