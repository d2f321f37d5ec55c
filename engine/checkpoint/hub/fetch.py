"""Has a model of the Hub fetched by a process of its own (see ``download``), and follows it.

Must not import the Hub's library: the front end, and whoever serves a local model, never needs it.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ...errors import CheckpointError
from .names import HubModel

END_S = 5.0
COMMAND = (sys.executable, "-P", "-m", "octavo.engine.checkpoint.hub.download")

logger = logging.getLogger(__name__)


class Fetch:
    """One download. Starts at once.

    Raises:
        CheckpointError: the process cannot be started.
    """

    def __init__(self, model: HubModel) -> None:
        self._model = model
        try:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C reaches the front end alone, which decides
            )
        except OSError as error:
            raise CheckpointError(f"The download of {model} cannot be started: {error}.") from error
        self._request = json.dumps(asdict(model)) + "\n"

    def wait(self, on_progress: Callable[[float], None] | None = None) -> Path:
        """Follow the download to its end. Returns the folder or the GGUF file to open.

        Args:
            on_progress: called with the share of the weights that is there, 0 to 1.

        Raises:
            CheckpointError: the model cannot be had, or :meth:`stop` was called.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._request)
            process.stdin.flush()
            for line in process.stdout:
                news = json.loads(line)
                if "fraction" in news and on_progress is not None:
                    on_progress(news["fraction"])
                if "note" in news:
                    logger.info("%s", news["note"])
                if "path" in news:
                    return Path(news["path"])
                if "refused" in news:
                    raise CheckpointError(news["refused"])
            process.wait()
        except CheckpointError:
            raise
        except (BrokenPipeError, ValueError):  # it ended, or was ended, or wrote what is no news
            pass
        finally:
            self.stop()
            process.stdout.close()
        raise CheckpointError(
            f"The download of {self._model} ended early, with status {process.returncode}; start again to go on."
        )

    def stop(self) -> None:
        """End the process, whatever it is doing. What has come whole stays in the cache."""
        process = self._process
        if process.stdin is not None:
            with suppress(OSError):  # it is gone
                process.stdin.close()  # upon which it removes what is half there, and ends
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fetch(model: HubModel, on_progress: Callable[[float], None] | None = None) -> Path:
    """Bring ``model`` into the cache and wait for it; see :meth:`Fetch.wait`."""
    return Fetch(model).wait(on_progress)
