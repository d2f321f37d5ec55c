"""The routes of the Hub that its library asks for, over files in memory, on a port of this machine.

Large files are kept elsewhere, as on the Hub: a redirect leads to another host's name, where ranges are
honoured, and where a transfer can be broken off or held.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 10_000  # bytes from which a file is kept elsewhere
PIECE = 4096


@dataclass
class Repo:
    """One repository, at one commit per revision."""

    files: dict[str, bytes]
    token: str | None = None  # that one needs to see it
    is_gated: bool = False  # seen by anybody, but not its files
    sizes: dict[str, int] = field(default_factory=dict)  # told in place of the true ones
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch, a tag or a commit."""
        for name, files in {"main": self.files, **self.revisions}.items():
            commit = hashlib.sha1(name.encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        return None


@dataclass
class Request:
    method: str
    path: str
    authorization: str | None
    range: str | None


class FakeHub:
    """What tests see of it: what it has, what it was asked, how it fails."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.status: int | None = None  # of every answer of the API
        self.break_offs: list[int] = []  # bytes after which the next transfers of large files end
        self.held_after: int | None = None  # bytes after which a transfer waits
        self.released = threading.Event()
        self.url = ""

    def transfers(self) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and "/elsewhere/" in r.path]

    @contextmanager
    def running(self, port: int = 0) -> Iterator[FakeHub]:
        hub = self

        class Bound(_Handler):
            fake = hub

        server = ThreadingHTTPServer(("127.0.0.1", port), Bound)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()


def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.fake.requests.append(
            Request(self.command, path, headers.get("Authorization"), headers.get("Range"))
        )
        parts = path.strip("/").split("/")
        if parts[0] == "elsewhere":
            self._elsewhere(parts[1])
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4], "/".join(parts[5:]))
        else:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _find(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; ``None`` when a refusal has been sent."""
        repo = self.fake.repos.get(repo_id)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.fake.status is not None:
            return self._refuse(self.fake.status)
        if repo is None or (repo.token is not None and token != repo.token):
            return self._refuse(401 if not token else 404, "RepoNotFound")
        if repo.is_gated:
            return self._refuse(403 if token else 401, "GatedRepo")
        return repo.at(revision) or self._refuse(404, "RevisionNotFound")

    def _refuse(self, status: int, code: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._send(status, b"{}", headers)

    def _api(self, repo_id: str, route: str, revision: str) -> None:
        found = self._find(repo_id, revision)
        if found is None:
            return
        commit, files = found
        sizes = {name: len(content) for name, content in files.items()}
        sizes |= self.fake.repos[repo_id].sizes
        listed = [
            {"size": sizes[name], "oid": "0" * 40, **_lfs(content, sizes[name])}
            for name, content in files.items()
        ]
        body: Any
        if route == "tree":
            body = [
                {"type": "file", "path": name, **facts}
                for name, facts in zip(files, listed, strict=True)
            ]
        else:
            siblings = [
                {"rfilename": name, **facts} for name, facts in zip(files, listed, strict=True)
            ]
            body = {"id": repo_id, "sha": commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo_id: str, revision: str, name: str) -> None:
        found = self._find(repo_id, revision)
        if found is None:
            return
        commit, files = found
        content = files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit}
        if len(content) < LARGE:
            self._send(200, content, {**headers, "ETag": f'"{etag(content)}"'})
            return
        host = self.fake.url.replace("127.0.0.1", "localhost")
        headers |= {
            "Location": f"{host}/elsewhere/{etag(content)}",
            "X-Linked-ETag": f'"{etag(content)}"',
            "X-Linked-Size": str(len(content)),
        }
        self._send(302, b"", headers)

    def _elsewhere(self, wanted: str) -> None:
        content = next(
            content
            for repo in self.fake.repos.values()
            for files in (repo.files, *repo.revisions.values())
            for content in files.values()
            if etag(content) == wanted
        )
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{wanted}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._transfer(content[start:])

    def _transfer(self, content: bytes) -> None:
        fake = self.fake
        end = fake.break_offs.pop(0) if fake.break_offs else len(content)
        for at in range(0, min(end, len(content)), PIECE):
            if fake.held_after is not None and at >= fake.held_after:
                fake.released.wait(60)
            self.wfile.write(content[at : min(at + PIECE, end)])
            self.wfile.flush()
        if end < len(content):
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _lfs(content: bytes, size: int) -> dict[str, Any]:
    if len(content) < LARGE:
        return {}
    return {"lfs": {"oid": etag(content), "sha256": etag(content), "size": size, "pointerSize": 1}}
