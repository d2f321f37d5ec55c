"""JSON in one line, for every client's notion of a line.

Clients that cut a stream as Python's ``str.splitlines`` does (httpx's ``iter_lines`` among them) end a line at U+0085, U+2028
and U+2029 too, in the middle of an event. Escaped, they are the same text to JSON. All else that ends a line is
below U+0020, which is always escaped.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def encode_line(content: Any) -> bytes:
    """``content`` as JSON that no client takes for several lines."""
    data = _encode(content)
    if b"\xe2\x80" in data:  # also of dashes and quotation marks
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    if b"\xc2\x85" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data
