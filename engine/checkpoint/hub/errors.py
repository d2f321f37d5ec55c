"""What goes wrong between here and the Hub, each as one sentence that says what to do.

Must not be imported where a model is a local path: the Hub's library comes with it.
"""

from __future__ import annotations

import errno
import json
import re

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

TROUBLE: tuple[type[BaseException], ...] = (
    *HfHubHTTPError.__bases__,
    RuntimeError,
    json.JSONDecodeError,
)
"""Every error of the library's HTTP client, whichever that is, of the system, of its native part, and of what
answers in the Hub's place."""

_TOO_MANY, _REFUSED = 429, (401, 403)
_PERMANENT = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO),
)


def is_passing(error: BaseException) -> bool:
    """Whether another try may go better."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == _TOO_MANY
    if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        return False
    return not (isinstance(error, OSError) and error.errno in _PERMANENT)


def is_away(error: BaseException) -> bool:
    """Whether the Hub was not asked, could not be, or would not say: then the cache may serve."""
    return not isinstance(error, RevisionNotFoundError)


def sentence(error: BaseException, repo_id: str, revision: str | None) -> str:
    """Why ``repo_id`` cannot be fetched, and what to do."""
    hub = _hub()
    if isinstance(error, GatedRepoError):
        return (
            f"{repo_id} is gated: accept its terms at {hub}/{repo_id}, then "
            f"{_with_token('give a token of that account')}."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision or 'main'}; --revision takes a branch, a tag or a commit."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"There is no model at {repo_id} here and no repository {repo_id} at {hub}; if it is private, "
            f"{_with_token('give a token that may read it')}."
        )
    if isinstance(error, DisabledRepoError):
        return f"{repo_id} is disabled at {hub}: give another model."
    if isinstance(error, HfHubHTTPError):
        return _status_sentence(error.response.status_code, repo_id)
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set: unset it, or {_elsewhere(repo_id)}."
    if isinstance(error, OSError) and error.errno in _PERMANENT:
        return f"{repo_id} cannot be kept: {error.strerror}; see --download-dir and HF_HOME."
    return (
        f"{hub} cannot be reached, or breaks off ({type(error).__name__}): check the network and HF_ENDPOINT, or "
        f"{_elsewhere(repo_id)}."
    )


def _hub() -> str:
    """The Hub's address, without a name and password that it may carry."""
    return re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)


def _status_sentence(status: int, repo_id: str) -> str:
    hub = _hub()
    if status in _REFUSED:
        return f"{hub} refuses {repo_id} with status {status}: {_with_token('give a token that may read it')}."
    if status == _TOO_MANY:
        return f"{hub} has had too many requests (status 429): wait, or set HF_TOKEN, whose limits are higher."
    return (
        f"{hub} answers {repo_id} with status {status}: try again later, or {_elsewhere(repo_id)}."
    )


def _with_token(what: str) -> str:
    has_token = get_token() is not None
    return f"{what} in HF_TOKEN" + (", since the one that is set may not" if has_token else "")


def _elsewhere(repo_id: str) -> str:
    return f"fetch {repo_id} where there is a network and give the folder's path"
