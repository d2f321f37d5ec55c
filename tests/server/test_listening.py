"""TCP, Unix sockets and TLS."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.engine.errors import ConfigError
from octavo.server.banner import Console, curl_line
from octavo.server.launch import serve
from octavo.server.listening import bind_unix, check_listening, listening, tls_context, url_of

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", key, "-out", cert, "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.mark.anyio
async def test_https(engine: FakeEngine, certificate: tuple[str, str]) -> None:
    config = ServerConfig(port=0, ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    with listening(config) as listener:
        url = url_of(config, listener)
        assert url.startswith("https://127.0.0.1:")
        serving = serve(engine, listener, config, ("tiny",), _silent(), tls_context(config))
        task = asyncio.create_task(serving)
        trusting = ssl.create_default_context(cafile=certificate[0])
        async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
            body = {"prompt": "a", "stream": True}
            assert (await client.post("/v1/completions", json=body)).text.endswith("[DONE]\n\n")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.anyio
async def test_clients_without_a_certificate_are_refused_where_one_is_asked_for(
    engine: FakeEngine, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    config = ServerConfig(port=0, ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert)
    with listening(config) as listener:
        url, tls = url_of(config, listener), tls_context(config)
        task = asyncio.create_task(serve(engine, listener, config, ("tiny",), _silent(), tls))
        trusting = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/health")
        trusting.load_cert_chain(cert, key)
        async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
            assert (await client.get("/health")).status_code == 200
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.anyio
async def test_unix_socket(engine: FakeEngine, tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"))
    with listening(config) as listener:
        assert url_of(config, listener) == f"unix:{config.uds}"
        task = asyncio.create_task(serve(engine, listener, config, ("tiny",), _silent()))
        transport = httpx.AsyncHTTPTransport(uds=config.uds)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            body = {"prompt": "a", "stream": True}
            assert (await client.post("/v1/completions", json=body)).text.endswith("[DONE]\n\n")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not (tmp_path / "s").exists()


def test_a_socket_that_an_ended_server_left_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with listening(ServerConfig(uds=path)):
        with pytest.raises(ConfigError, match="a server listens there"):
            listening(ServerConfig(uds=path)).__enter__()
        assert Path(path).is_socket()


def test_a_name_that_another_server_took_over_is_left_to_it(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with listening(ServerConfig(uds=path)) as first:
        first.close()  # as at the end of serving, before the name is removed
        second = bind_unix(path)
    assert Path(path).is_socket()
    second.close()


def test_other_files_are_never_removed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, tmp_path / "no" / "folder", Path("/x" * 200), Path("a\0b")):
        with pytest.raises(ConfigError, match=r"^--uds "):
            listening(ServerConfig(uds=str(path))).__enter__()
    assert file.read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "k"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({"root_path": "llm"}, "--root-path must begin with /"),
        ({"root_path": "/llm/"}, "--root-path must begin with /"),
        ({"allowed_origins": ('["*"]',)}, "--allowed-origins takes origins"),
        ({"allowed_origins": ("https://a.example/",)}, "--allowed-origins takes origins"),
        ({"allowed_origins": ("a.example",)}, "--allowed-origins takes origins"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "--allow-credentials needs"),
    ],
)
def test_wrong_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_listening(ServerConfig(**options))


def test_files_that_are_no_certificates_are_named(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = certificate
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for options in (
        {"ssl_certfile": "/nowhere"},
        {"ssl_certfile": key},
        {"ssl_certfile": cert, "ssl_keyfile": cert},
        {"ssl_certfile": cert, "ssl_keyfile": locked},
    ):
        with pytest.raises(ConfigError, match=r"^--ssl-certfile: /.* cannot be used: "):
            tls_context(ServerConfig(**options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^--ssl-ca-certs: /nowhere cannot be used: "):
        tls_context(ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs="/nowhere"))


def test_curl_line_of_a_unix_socket() -> None:
    line = curl_line("m", "unix:/tmp/a b", needs_key=False)
    assert line.startswith("curl -N --unix-socket '/tmp/a b' http://localhost/v1/completions ")


def _silent() -> Console:
    return Console(io.StringIO())
