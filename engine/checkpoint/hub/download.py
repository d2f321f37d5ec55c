"""Fetches one model from the Hub into its cache. Run as a module: a process of its own.

So that nobody else loads the Hub's library or waits for its threads: whoever wants a model starts this
process (see ``fetch``), reads its progress and may end it at any time. Standard input brings what is
wanted, as one line of JSON, and its end ends the process. Standard output has a line of JSON for each
piece of news. What has come whole stays in the cache, so that another try goes on from there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tqdm import tqdm

from ...config.sizes import size_text
from ...errors import CheckpointError
from ..checkpoint import check_config
from ..safetensors_files import INDEX, shard_names
from .errors import TROUBLE, is_away, is_passing, sentence
from .files import SMALL, Chosen, choose, is_small
from .names import HubModel

MAX_TRIES = 4
RETRY_S = 1.0
REPORT_S = 0.1
NOTED_BYTES = 1 << 20

Report = Callable[[Mapping[str, Any]], None]
Result = TypeVar("Result")


def download(wanted: HubModel, report: Report) -> Path:
    """Bring a model into the cache. Returns the folder, or the GGUF file, to open.

    Nothing that is there is fetched again. Where the Hub does not answer, or refuses, a snapshot that is
    whole serves, and a note says so.

    Raises:
        CheckpointError: it cannot be had; one sentence.
    """
    try:
        sizes, commit = _listed(wanted, report)
    except HFValidationError as error:
        raise CheckpointError(
            f"{wanted.repo_id} is no name of a repository: {str(error).rstrip('.')}."
        ) from error
    except TROUBLE as error:
        if is_away(error):
            return _from_cache(wanted, error, report)
        raise CheckpointError(_why(error, wanted)) from error
    chosen = choose(sizes, wanted.repo_id, wanted.choice)
    if chosen.note:
        report({"note": chosen.note})
    try:
        return _Snapshot(wanted, sizes, commit, report).fetch(chosen)
    except TROUBLE as error:
        raise CheckpointError(_why(error, wanted)) from error


class _Snapshot:
    """One commit of a repository, coming into the cache."""

    def __init__(
        self, wanted: HubModel, sizes: Mapping[str, int], commit: str, report: Report
    ) -> None:
        self._wanted, self._sizes, self._commit, self._report = wanted, sizes, commit, report

    def fetch(self, chosen: Chosen) -> Path:
        """First what is small and says whether the model can be served at all, then its weights."""
        small = [name for name in self._sizes if is_small(name)]
        small += [INDEX] if INDEX in chosen.weights and INDEX not in small else []
        self._bring(small, lambda _fraction: None)
        folder, weights = self._folder(), chosen.weights
        if chosen.gguf is None:
            check_config(folder, self._wanted.model_impl)
            weights = tuple(shard_names(folder)) if INDEX in weights else weights
        for name in weights:
            if name not in self._sizes:
                raise CheckpointError(
                    f"{self._wanted.repo_id} lacks {name}, which its {INDEX} names."
                )
        self._bring(weights, lambda fraction: self._report({"fraction": fraction}))
        return folder if chosen.gguf is None else folder / chosen.gguf

    def _folder(self) -> Path:
        cache = Path(self._wanted.cache_dir or constants.HF_HUB_CACHE).expanduser().resolve()
        name = "--".join(("models", *self._wanted.repo_id.split("/")))
        return cache / name / "snapshots" / self._commit

    def _bring(self, names: Sequence[str], on_progress: Callable[[float], None]) -> None:
        total = self._num_bytes_missing(names)
        if total == 0 and self._are_named(names):
            return
        self._check_room(total)
        if total > NOTED_BYTES:
            repo_id = self._wanted.repo_id
            self._report({"note": f"{repo_id}: {size_text(total)} are to be fetched"})

        def attempt() -> None:
            before = total - self._num_bytes_missing(names)
            self._snapshot(names, _bar_class(lambda n: on_progress((before + n) / max(1, total))))

        _persist(attempt, self._report)

    def _snapshot(self, names: Sequence[str], bar: type[tqdm[Any]]) -> None:
        snapshot_download(
            self._wanted.repo_id,
            revision=self._wanted.revision,
            cache_dir=self._wanted.cache_dir,
            allow_patterns=[_escaped(name) for name in names],
            tqdm_class=cast(Any, bar),
        )
        if self._num_bytes_missing(names):  # the branch moved on after its files were listed
            raise CheckpointError(
                f"{self._wanted.repo_id} changed while it was fetched: try again."
            )

    def _num_bytes_missing(self, names: Sequence[str]) -> int:
        return sum(self._sizes[name] for name in names if not self._find(name, self._commit))

    def _are_named(self, names: Sequence[str]) -> bool:
        """Whether the cache knows that the branch is at this commit, and so finds it without a network."""
        found = [self._find(name, self._wanted.revision) for name in names]
        return all(path is not None and self._commit in path.parts for path in found)

    def _find(self, name: str, revision: str | None) -> Path | None:
        found = try_to_load_from_cache(
            self._wanted.repo_id, name, cache_dir=self._wanted.cache_dir, revision=revision
        )
        return Path(found) if isinstance(found, str) else None

    def _check_room(self, num_bytes: int) -> None:
        folder = self._folder()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if num_bytes > free:
            raise CheckpointError(
                f"{self._wanted.repo_id} needs {size_text(num_bytes)} more on the disk, and {size_text(free)} are "
                f"free at {folder}: make room, or choose another place with --download-dir or HF_HOME."
            )


def _listed(wanted: HubModel, report: Report) -> tuple[dict[str, int], str]:
    """The sizes of a repository's files, by name, and the commit that they are of."""
    info = _persist(
        lambda: HfApi().model_info(
            wanted.repo_id,
            revision=wanted.revision or constants.DEFAULT_REVISION,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        ),
        report,
        only_if=lambda error: isinstance(error, HfHubHTTPError),  # else the cache serves at once
    )
    files = info.siblings or []
    return {file.rfilename: file.size or 0 for file in files}, str(info.sha)


def _from_cache(wanted: HubModel, error: BaseException, report: Report) -> Path:
    """The model as the cache has it, if it has all of it.

    Raises:
        CheckpointError: it has not.
    """
    why = _why(error, wanted)
    try:
        folder = Path(
            snapshot_download(
                wanted.repo_id,
                revision=wanted.revision,
                cache_dir=wanted.cache_dir,
                local_files_only=True,
                allow_patterns=list(SMALL),
                ignore_patterns=["*/*"],
            )
        )
    except LocalEntryNotFoundError as missing:
        was_asked = isinstance(error, HfHubHTTPError)
        text = why if was_asked else f"{wanted} is not in the cache, at least not whole. {why}"
        raise CheckpointError(text) from missing
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    try:
        chosen = choose(names, wanted.repo_id, wanted.choice)
        lost = set(shard_names(folder) if INDEX in chosen.weights else ()) - names
    except CheckpointError as missing:
        raise CheckpointError(f"In the cache, {missing} {why}") from missing
    if lost:
        raise CheckpointError(f"In the cache, {wanted} lacks {min(lost)}. {why}")
    report({"note": f"{wanted} comes from the cache. {why}"})
    return folder if chosen.gguf is None else folder / chosen.gguf


def _why(error: BaseException, wanted: HubModel) -> str:
    return sentence(error, wanted.repo_id, wanted.revision)


def _persist(
    work: Callable[[], Result],
    report: Report,
    only_if: Callable[[BaseException], bool] = lambda _: True,
) -> Result:
    """Do ``work``, again where trouble may pass. Whole files stay, so that each try has less to do."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            return work()
        except TROUBLE as error:
            if not tries_left or not is_passing(error) or not only_if(error):
                raise
            report(
                {"note": f"The download broke off ({type(error).__name__}) and is taken up again"}
            )
            time.sleep(RETRY_S)
    raise AssertionError("the last try returns or raises")


def _bar_class(on_bytes: Callable[[float], None]) -> type[tqdm[Any]]:
    """What the library takes for a progress bar: tells how many bytes have come, instead of a terminal."""
    lock, told = threading.Lock(), [0.0, 0.0]  # the number, and when it was told

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            quiet = {"file": StringIO(), "mininterval": 1e9, "disable": False}
            super().__init__(*args, **kwargs | quiet)

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B":  # others count files; two count the same bytes
                with lock:
                    now = time.monotonic()
                    if self.n > told[0] and now >= told[1] + REPORT_S:
                        told[:] = self.n, now
                        on_bytes(self.n)
            return shown

    return Bar


def _escaped(name: str) -> str:
    """``name`` as a pattern that matches it alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    _remove_parts()
    os._exit(0)


def _remove_parts() -> None:
    """Remove the files that are still being written: the library never goes on with another process's."""
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            path = Path(os.readlink(link))
            if path.suffix == ".incomplete":
                path.unlink()


def main() -> NoReturn:
    """The process: read what is wanted, fetch it, say how it went."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # warnings tell signed addresses
    wanted = HubModel(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()
    lock = threading.Lock()

    def report(news: Mapping[str, Any]) -> None:
        with lock:
            print(json.dumps(news), flush=True)  # noqa: T201

    try:
        report({"path": str(download(wanted, report))})
    except CheckpointError as error:
        report({"refused": str(error)})
    sys.stdout.flush()
    os._exit(0)  # without waiting for the library's threads


if __name__ == "__main__":
    main()
