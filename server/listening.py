"""Where the server listens, and how it says so: TCP or a Unix socket, plain or TLS.

Must not import web libraries: the socket is bound before they are.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from ..engine.config.server_config import ServerConfig
from ..engine.errors import ConfigError
from .banner import base_url

BACKLOG = 2048


def check_listening(config: ServerConfig) -> None:
    """
    Raises:
        ConfigError: options contradict each other, or one is of the wrong form.
    """
    if config.ssl_certfile is None:
        for flag, value in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
        ):
            if value is not None:
                raise ConfigError(f"{flag} needs --ssl-certfile.")
    root = config.root_path
    if root and (not root.startswith("/") or root.endswith("/")):
        raise ConfigError(f"--root-path must begin with / and not end with it, got {root!r}.")
    for origin in config.allowed_origins or ():
        _check_origin(origin)
    if config.allow_credentials and "*" in (config.allowed_origins or ()):
        raise ConfigError("--allow-credentials needs --allowed-origins that are named, not *.")


def _check_origin(origin: str) -> None:
    scheme, host, *rest = urlsplit(origin)
    if origin != "*" and (not scheme or not host or any(rest)):
        raise ConfigError(
            f"--allowed-origins takes origins as in https://example.org, or *, got {origin!r}."
        )


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What HTTPS is spoken with; ``None`` for plain HTTP. TLS 1.2 is the oldest.

    Raises:
        ConfigError: a file cannot be read or is no such thing.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
    with _named(f"--ssl-certfile: {files}"):
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_passphrase)
    if config.ssl_ca_certs is not None:
        with _named(f"--ssl-ca-certs: {config.ssl_ca_certs}"):
            context.load_verify_locations(config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")  # else the terminal would be asked for it


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{what} cannot be used: {reason}.") from None


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket, closed afterwards; a Unix socket's name is gone then.

    Raises:
        ConfigError: the address or name cannot be used.
    """
    if config.uds is None:
        with bind(config.host, config.port) as listener:
            yield listener
        return
    listener = bind_unix(config.uds)
    try:
        with listener:
            yield listener
    finally:
        with suppress(OSError):  # another server may have taken the name over
            _remove_stale(config.uds)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    Raises:
        ConfigError: the address is in use or unknown.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address here: {error.strerror}.") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} on {host} cannot be used: {error.strerror}. Choose another with --port."
        ) from None
    listener.setblocking(False)
    return listener


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket. A name that an ended server left behind is taken over.

    Raises:
        ConfigError: a server listens there, something else has that name, or it is no possible one.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except (OSError, ValueError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--uds {path} cannot be used: {reason}.") from None
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """Unlink a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "there is something else than a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue is an answer too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "a server listens there")


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """The URL to try from this machine; of a Unix socket, its name."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    url = base_url(config.host, listener.getsockname()[1])
    return url if config.ssl_certfile is None else url.replace("http:", "https:", 1)
