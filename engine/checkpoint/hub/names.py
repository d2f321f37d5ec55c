"""What the name of a Hub repository looks like, and when a model's name is one rather than a path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<choice>[\w./-]+))?", re.ASCII)
_MAX_CHARS = 96  # the Hub's own limit


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub: ``ORG/NAME``, or ``ORG/NAME:CHOICE`` for one GGUF file of several.

    Has no token: the Hub's library reads HF_TOKEN itself.
    """

    repo_id: str
    choice: str | None = None  # a GGUF file's name, or a quantisation such as "Q4_K_M"
    revision: str | None = None  # branch, tag or commit; ``None``: main
    cache_dir: str | None = None  # ``None``: where HF_HOME and HF_HUB_CACHE say
    model_impl: str = "auto"  # as --model-impl: decides which architectures are worth fetching

    def __str__(self) -> str:
        return self.repo_id if self.choice is None else f"{self.repo_id}:{self.choice}"


def hub_model(model: str | os.PathLike[str] | None) -> HubModel | None:
    """What ``model`` names on the Hub; ``None`` for a path. Whatever exists here is a path."""
    text = "" if model is None else os.fspath(model)
    found = _NAME.fullmatch(text)
    if found is None or os.path.exists(text):
        return None
    repo_id, choice = found["repo"], found["choice"]
    if repo_id.endswith(".gguf") or len(repo_id) > _MAX_CHARS or "--" in repo_id or ".." in repo_id:
        return None
    if choice is not None and ".." in PurePosixPath(choice).parts:
        return None
    return HubModel(repo_id, choice)
