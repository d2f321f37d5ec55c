"""What a tokenizer keeps of the words that it has seen is bounded, in every thread."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from octavo.engine.text.tokenizer import KEPT_WORDS, Tokenizer

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def allocated_bytes() -> int:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("only glibc tells")
    library.mallinfo2.restype = MallInfo
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.parametrize("is_in_thread", [False, True])
def test_new_words_take_no_more_memory_once_the_cache_is_full(is_in_thread: bool) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(backend)
    chance = random.Random(0)
    grown: list[int] = []

    def see_words() -> None:
        for count in (KEPT_WORDS + 500, 4 * KEPT_WORDS):
            before = allocated_bytes()
            for _ in range(count):
                tokenizer.encode("".join(chr(chance.randint(97, 600)) for _ in range(16)))
            grown.append(allocated_bytes() - before)

    if is_in_thread:
        thread = threading.Thread(target=see_words)
        thread.start()
        thread.join()
    else:
        see_words()
    assert grown[0] > 1 << 20  # it does keep words
    assert grown[1] < 1 << 19
