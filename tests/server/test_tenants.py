"""Keys from a file, and that tenants see nothing of each other."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.engine.errors import ConfigError
from octavo.server import api_keys as module
from octavo.server.api_keys import ApiKeys
from octavo.server.app import create_app
from tests.server.test_launch import running

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

PATH = "/v1/responses"


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def put(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who  key\n\nann  sk-ann\nann sk-ann-2\nbob\tsk-bob 2.5\n")
    return path


def test_names_of_keys(file: Path) -> None:
    keys = ApiKeys(("sk-flag", "sk-flag-2"), str(file))
    tenants = [keys.tenant(f"Bearer {k}".encode()) for k in ("sk-ann", "sk-ann-2", "sk-bob")]
    assert tenants == [("ann", 1.0), ("ann", 1.0), ("bob", 2.5)]
    flags = {keys.tenant(b"Bearer sk-flag"), keys.tenant(b"Bearer sk-flag-2")}
    assert len(flags | {None, *tenants}) == 5
    assert keys.tenant(b"Bearer ann") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key"),
        ("# ann sk-hush\n", "no key"),
        ("ann sk-ann\nsk-hush\n", "line 2"),
        ("ann sk-hush sk-hush\n", "line 1"),
        ("ann sk-hush 0\n", "line 1"),
        ("ann sk-hush 2\nann sk-hush-2\n", "line 2"),
        ("a@b sk-hush\n", "line 1"),
        ("ann sk-hush\nbob sk-hush\n", "line 2"),
    ],
)
def test_files_that_are_refused_name_no_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refusal:
        ApiKeys((), str(file))
    assert "hush" not in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .*cannot be read"):
        ApiKeys((), str(tmp_path / "none"))


def test_a_changed_file_counts_and_a_broken_one_changes_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    keys = ApiKeys((), str(file))
    other = file.with_name("other")
    other.write_text("cid sk-cid\n")
    other.replace(file)
    assert keys.tenant(b"Bearer sk-cid") == ("cid", 1.0)
    assert keys.tenant(b"Bearer sk-ann") is None
    with caplog.at_level(logging.ERROR):
        file.write_text("sk-hush\n")
        assert keys.tenant(b"Bearer sk-cid") == ("cid", 1.0)
    assert "line 1" in caplog.text
    assert "hush" not in caplog.text
    file.unlink()
    assert keys.tenant(b"Bearer sk-cid") == ("cid", 1.0)


@pytest.mark.anyio
async def test_a_hangup_reads_the_file_again(
    engine: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 3600.0)
    async with running(engine, api_key_file=str(file)) as server:
        assert (await server.client.get("/v1/models")).status_code == 401
        assert (await server.client.get("/v1/models", headers=key("sk-ann"))).status_code == 200
        put(file, "cid sk-cid\n")
        assert (await server.client.get("/v1/models", headers=key("sk-cid"))).status_code == 401
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await server.client.get("/v1/models", headers=key("sk-cid"))).status_code == 200
        assert (await server.client.get("/v1/models", headers=key("sk-ann"))).status_code == 401


@pytest.mark.anyio
async def test_a_stored_response_is_its_tenants_own(engine: FakeEngine, file: Path) -> None:
    app = create_app(engine, ServerConfig(api_key_file=str(file)), ("tiny",))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        for body in ({"input": "a"}, {"input": "a", "background": True}):
            if "background" in body:
                engine.hold_at = 3
            created = await client.post(PATH, json=body, headers=key("sk-ann"))
            path = f"{PATH}/{created.json()['id']}"
            for method, tail in (
                ("GET", ""),
                ("GET", "/input_items"),
                ("DELETE", ""),
                ("POST", "/cancel"),
            ):
                answer = await client.request(method, path + tail, headers=key("sk-bob"))
                assert answer.status_code == 404
            more = {"input": "b", "previous_response_id": created.json()["id"]}
            answer = await client.post(PATH, json=more, headers=key("sk-bob"))
            assert answer.json()["error"]["code"] == "previous_response_not_found"
            assert (await client.get(path, headers=key("sk-ann-2"))).status_code == 200
        assert {request.tenant for request in engine.requests} == {"ann"}
