"""Requests that schemathesis generates from the server's own OpenAPI document.

``GENERATED`` in the environment says how many a route with a body gets, 300 if it is not set. Refused here: a
status of 500 or above, a status or a content type that the document does not have, errors of another
shape; afterwards the engine must be the one it was, and hold nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

if TYPE_CHECKING:
    from tests.clients.conftest import Server

HERE = Path(__file__).resolve().parent
NUM_REQUESTS = int(os.environ.get("GENERATED", "300"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
CANARY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
LEAST_SHARE_ANSWERED = 0.1
"""Of a route's requests: else the fuzzing would be one of the validation alone."""


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    octavo: list[str],
    start_server: Callable[..., Any],
) -> Iterator[Server]:
    """A random model that is nearly free, in a small pool of blocks, with every route."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    python = str(Path(octavo[0]).with_name("python"))
    subprocess.run([python, str(HERE / "tiny_model.py"), str(folder)], check=True)
    flags = ["--model", str(folder), "--max-model-len", "64", "--max-num-seqs", "16"]
    flags += ["--num-gpu-blocks-override", "64", "--check-invariants", "--log-level", "error"]
    flags += ["--enable-debug-endpoints", "--enable-tokenizer-info-endpoint"]
    with start_server(*flags) as running:
        yield running


def test_generated_requests(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    before = httpx.post(f"{server.url}/v1/completions", json=CANARY).json()["choices"]
    reports = [_generate(server.url, mode, tmp_path) for mode in ("positive", "negative")]
    statuses = _statuses(reports, document)
    with capsys.disabled():
        sys.stdout.write(_table(statuses))
    _check_that_it_was_enough(statuses, document)
    server.wait_idle()
    server.check_nothing_is_held()
    again = httpx.post(f"{server.url}/v1/completions", json=CANARY).json()["choices"]
    assert again == before
    assert server.process.poll() is None


def _generate(url: str, mode: str, folder: Path) -> Path:
    """Half of the requests: those that the schemas allow, or those that they do not; what was said."""
    report = folder / f"{mode}.har"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--mode", mode, "--max-examples", str(NUM_REQUESTS // 2)),
            *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS)),
            *("--seed", os.environ.get("SEED", "8"), "--suppress-health-check", "all"),
            # one worker: CPython 3.11 may not parse in two threads at a time, which hypothesis does
            *("--workers", "1", "--request-timeout", "120", "--continue-on-failure", "--no-color"),
            *("--report-har-path", str(report)),
        ],
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "settling", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return report


def _statuses(reports: list[Path], document: dict[str, Any]) -> dict[tuple[str, str], Counter[int]]:
    """How often each route answered what; only methods that the route has."""
    found: dict[tuple[str, str], Counter[int]] = {}
    for entry in (
        one for path in reports for one in json.loads(path.read_text())["log"]["entries"]
    ):
        method = entry["request"]["method"].lower()
        path = _template(urlsplit(entry["request"]["url"]).path, document)
        if method in document["paths"].get(path, ()):
            found.setdefault((method, path), Counter())[entry["response"]["status"]] += 1
    return found


def _table(statuses: dict[tuple[str, str], Counter[int]]) -> str:
    lines = [
        f"{method:6} {path:32} {dict(sorted(counts.items()))}"
        for (method, path), counts in sorted(statuses.items())
    ]
    return "\n".join(["", *lines, ""])


def _template(path: str, document: dict[str, Any]) -> str:
    """The path of the document that ``path`` was made from: of several the one with the longest pattern."""
    fitting = [one for one in document["paths"] if re.fullmatch(re.sub("{.*?}", ".*", one), path)]
    return max(fitting, key=len, default=path)


def _check_that_it_was_enough(
    statuses: dict[tuple[str, str], Counter[int]], document: dict[str, Any]
) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            counts = statuses[method, path]
            if "requestBody" in operation:
                assert counts.total() >= NUM_REQUESTS, (path, counts)
                assert counts[200] >= LEAST_SHARE_ANSWERED * counts.total(), (path, counts)
