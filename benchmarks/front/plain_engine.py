"""The plain server's engine in a process of its own: one message for each token: ``plain_engine.py ENDPOINT STEP_MS``.

Takes ``{"id", "max_tokens"}`` and sends ``{"id", "token", "is_last"}``, as JSON over a ZeroMQ socket.
"""

from __future__ import annotations

import sys
import time

import zmq
from canned_engine import TOKEN_IDS


def main() -> None:
    endpoint, step_s = sys.argv[1], float(sys.argv[2]) / 1000
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(endpoint)
    left: dict[str, int] = {}
    tick, step = time.monotonic(), 0
    while True:
        while socket.poll(0 if left else None):
            request = socket.recv_json()
            left[request["id"]] = request["max_tokens"]
        now = time.monotonic()
        tick = max(tick + step_s, now)
        time.sleep(tick - now)
        token = TOKEN_IDS[step % len(TOKEN_IDS)]
        for name in left:
            left[name] -= 1
            socket.send_json({"id": name, "token": token, "is_last": not left[name]})
        left = {name: count for name, count in left.items() if count}
        step += 1


if __name__ == "__main__":
    main()
