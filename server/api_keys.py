"""The accepted API keys and whose they are: from the configuration, and from a file that may change.

Whoever has a key is a tenant, by its name: the key's in the file, else its place among the keys of ``--api-key``.
Keys are kept as digests only, and no message holds one. Must not import web libraries: a file that cannot be
used is refused before they are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..engine.config.server_config import ServerConfig
from ..engine.errors import ConfigError

LOOK_S = 2.0
"""So often it is looked whether the file has changed, when a request comes."""
MAX_FILE_BYTES = 8 << 20
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
_WEIGHT = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

logger = logging.getLogger(__name__)


class Tenant(NamedTuple):
    """Whose a key is, and the share of the engine that goes with it."""

    name: str
    weight: float = 1.0


class _Key(NamedTuple):
    digest: bytes
    tenant: Tenant


class ApiKeys:
    """The accepted keys.

    Args:
        keys: As they are given with ``--api-key``.
        file: With a name and a key on each line.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, keys: Sequence[str] = (), file: str | None = None) -> None:
        self._given = tuple(
            _Key(_digest(k.encode()), Tenant(f"#{i}")) for i, k in enumerate(keys, 1)
        )
        self._file = None if file is None else Path(file)
        self._seen: tuple[int, ...] | None = None  # of the file, when it was last read
        self._next_look = 0.0
        self._keys = self._given
        if self._file is not None:
            self._seen = _stamp(self._file)
            self._keys += _read(self._file)

    def tenant(self, authorization: bytes) -> Tenant | None:
        """Whose key an ``Authorization`` header carries; ``None``: it carries none that is accepted.

        Compares against every key, in constant time each: neither the time nor a non-ASCII byte
        tells anything.
        """
        self._look()
        scheme, _, token = authorization.partition(b" ")
        given, found = _digest(token.strip()), None
        for digest, tenant in self._keys:
            if hmac.compare_digest(given, digest):
                found = tenant
        return found if scheme.lower() == b"bearer" else None

    def reload(self) -> None:
        """Read the file again. One that cannot be used changes nothing, and is logged."""
        if self._file is None:
            return
        self._seen = _stamp(self._file)
        try:
            self._keys = self._given + _read(self._file)
        except ConfigError as error:
            logger.error("%s The keys stay as they were.", error)
        else:
            logger.info("%d keys read from %s", len(self._keys) - len(self._given), self._file)

    def _look(self) -> None:
        if self._file is None or (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_S
        if _stamp(self._file) != self._seen:
            self.reload()


def api_keys(config: ServerConfig) -> ApiKeys | None:
    """The keys that ``config`` asks for; ``None``: everybody may come.

    Raises:
        ConfigError: the file cannot be used.
    """
    if not config.api_key and config.api_key_file is None:
        return None
    return ApiKeys(config.api_key or (), config.api_key_file)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with the file, be it written to or another one put in its place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> tuple[_Key, ...]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is not UTF-8.") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} has more than {MAX_FILE_BYTES >> 20} MiB.")
    return tuple(_parse(path, text.splitlines()))


def _parse(path: Path, lines: Iterable[str]) -> Iterable[_Key]:
    """One key a line, behind a name, and maybe a weight; ``#`` begins a comment line."""
    found: dict[bytes, Tenant] = {}
    weights: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"--api-key-file {path}, line {number}"
        if len(words) not in (2, 3) or not _NAME.fullmatch(words[0]):
            raise ConfigError(
                f"{where}: a name (letters, digits, dot, dash, underscore), a key and maybe a weight are expected, "
                "with space between."
            )
        tenant = Tenant(words[0], _weight(where, words[2]) if len(words) == 3 else 1.0)
        if found.setdefault(_digest(words[1].encode()), tenant) != tenant:
            raise ConfigError(f"{where}: the key has another name or weight too.")
        if weights.setdefault(tenant.name, tenant.weight) != tenant.weight:
            raise ConfigError(f"{where}: {tenant.name} has another weight too.")
    if not found:
        raise ConfigError(f"--api-key-file {path} holds no key.")
    return [_Key(digest, tenant) for digest, tenant in found.items()]


def _weight(where: str, text: str) -> float:
    weight = float(text) if _WEIGHT.fullmatch(text) else 0.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ConfigError(f"{where}: the weight must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}.")
    return weight
