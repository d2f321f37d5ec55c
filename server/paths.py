"""A request's path as the router compares it, below ``--root-path``."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Tells routes and documentation the prefix that clients see. The path may have it or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path without the prefix that a proxy may have left in front of it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
