"""What leaves at the end of a turn of the event loop, when a connection has gone in the meantime."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from octavo.server.protocol import Outbox


async def _transport(ours: socket.socket) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    return transport


async def _send_beside_a_closed_one() -> tuple[bytes, list[str]]:
    loop, outbox = asyncio.get_running_loop(), Outbox()
    faults: list[str] = []
    loop.set_exception_handler(lambda _, context: faults.append(str(context)))
    (gone, peer), (ours, theirs) = socket.socketpair(), socket.socketpair()
    theirs.setblocking(False)
    closing, open_one = await _transport(gone), await _transport(ours)
    closing.close()  # which is done before the end of this turn
    outbox.put(closing, b"lost")
    outbox.put(open_one, b"kept")
    received = await asyncio.wait_for(loop.sock_recv(theirs, 16), 10)
    open_one.close()
    theirs.close()
    peer.close()
    return received, faults


def test_a_connection_that_goes_takes_nothing_from_the_others() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(_send_beside_a_closed_one()) == (b"kept", [])
