"""CPU use of a server that nobody asks anything.

    python benchmarks/idle.py [--seconds 20] [-- octavo serve flags]

Starts ``octavo serve``, waits until it is ready, lets it rest, and prints the share of one core that all
its processes used over the given time.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), *args.flags]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            time.sleep(0.2)
        httpx.post(
            f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "Hello", "max_tokens": 8}
        )
        time.sleep(2)
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        before = [sum(member.cpu_times()[:2]) for member in family]
        time.sleep(args.seconds)
        used = [sum(m.cpu_times()[:2]) - b for m, b in zip(family, before, strict=True)]
        share = {
            m.name(): round(100 * u / args.seconds, 3) for m, u in zip(family, used, strict=True)
        }
        print(json.dumps({"percent_of_a_core": share, "total": round(sum(share.values()), 3)}))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
