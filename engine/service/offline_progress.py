"""Progress bars on standard error: of prompts, of a download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(total: int, use_tqdm: bool | Callable[..., tqdm[Any]]) -> tqdm[Any] | None:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="prompts")
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True)


@contextmanager
def download_bar() -> Iterator[Callable[[float], None]]:
    """What shows a download's progress on a terminal; nothing while there is none."""
    from tqdm import tqdm

    bars: list[tqdm[Any]] = []

    def show(fraction: float) -> None:
        if not bars:
            bars.append(tqdm(total=100, desc="Downloading", unit="%", disable=None))
        bars[0].update(int(100 * fraction) - bars[0].n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
