"""octavo's whole front end over the canned engine: ``octavo_server.py PORT STEP_MS``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from octavo.engine.build import find_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.config.server_config import ServerConfig
from octavo.engine.service.client import EngineClient
from octavo.server.banner import Console
from octavo.server.launch import serve
from octavo.server.listening import bind

ENGINE = Path(__file__).with_name("canned_engine.py")


def main() -> int:
    port, step_ms = sys.argv[1:3]
    config = EngineConfig()
    command = [sys.executable, "-P", str(ENGINE), step_ms]
    engine = EngineClient(config, find_checkpoint(config), command, "warning")
    with (
        bind("127.0.0.1", int(port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(serve(engine, listener, ServerConfig(), ("m",), Console(None)))


if __name__ == "__main__":
    sys.exit(main())
