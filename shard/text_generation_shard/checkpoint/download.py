"""Finds the files of a model: in a local directory, in the hub cache, or on the hub."""

import errno
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from text_generation_shard.checkpoint.files import (
    CONVERTED_NAME,
    PICKLE_SUFFIXES,
    are_pickled,
    check_config,
    check_directory,
    convert,
    weight_names,
)
from text_generation_shard.errors import ModelError
from text_generation_shard.trusted_folders import temporary_folder

logger = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.json"
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SMALL_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
HUB_TIMEOUT_S = 10.0  # as huggingface_hub's own for a download
PROGRESS_S = 3.0  # often enough to show that it goes on
_STALE_S = 600.0  # a download that lives writes at least every HUB_TIMEOUT_S
# By the names of huggingface_hub's errors: its import is slow, and local directories need none.
_HUB_ERRORS = {
    "GatedRepoError": "{model} is gated: accept its conditions at {hub}/{model} and set HF_TOKEN "
    "to a token of that account",
    "RevisionNotFoundError": "{model} has no revision {revision}: give --revision a branch, a tag "
    "or a commit that {hub}/{model} lists",
    "RepositoryNotFoundError": "the hub has no model {model}, or it is private: check the spelling "
    "of --model-id, or set HF_TOKEN to a token that may read it",
    "OfflineModeIsEnabled": "{model} is not complete in the hub cache {cache}, and HF_HUB_OFFLINE "
    "forbids to download it: unset HF_HUB_OFFLINE or give --model-id a directory",
}


def resolve_model(
    model_id: str,
    revision: str | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The directory of `model_id`, downloaded if it is not on this machine.

    A directory of that name takes precedence over the hub. `endpoint`: the hub's address; None:
    that of huggingface_hub. Raises ModelError.
    """
    directory = Path(model_id).expanduser()
    if model_id and directory.is_dir():
        logger.info("using local directory %s", directory)
        if revision is not None:
            logger.info("the revision %s has no effect on a local directory", revision)
    elif re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model_id):
        directory = _HubModel(model_id, revision or "main", cache_dir, endpoint).fetch()
    else:
        raise ModelError(
            f"{model_id} is neither a directory here nor a hub id: give a directory that holds "
            "config.json and the weights, or a hub id like Qwen/Qwen2.5-0.5B-Instruct"
        )
    names = check_directory(directory)
    if are_pickled(names):
        convert(directory, names)
    _ensure_tokenizer(directory)
    return directory


class _HubModel:
    """One revision of a repository in the hub cache."""

    def __init__(
        self, repo_id: str, revision: str, cache_dir: Path | None, endpoint: str | None
    ) -> None:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        for chatty in ("httpx", "httpx2", "urllib3"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._repo_id, self._revision = repo_id, revision
        self._api = HfApi(endpoint=endpoint)
        self._cache_dir = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()

    def fetch(self) -> Path:
        """The complete snapshot of the model; raises ModelError."""
        cached = self._cached_snapshot()
        if cached is None and not _can_be_written(self._cache_dir):
            self._use_temporary_cache()
            cached = self._cached_snapshot()
        if cached is not None and cached.name == self._revision:
            return _found(cached)  # a commit never changes, so the hub is not queried
        try:
            return self._complete(*self._list_files(), cached)
        except Exception as error:
            explained = self._explained(error)
            if cached is None:
                raise explained from error
            if type(error).__name__ != "OfflineModeIsEnabled":
                logger.info("%s", explained)
            return _found(cached)

    def _use_temporary_cache(self) -> None:
        try:
            elsewhere = temporary_folder("huggingface")
        except OSError as error:
            raise ModelError(
                f"{error}; or choose a cache that can be written with --huggingface-hub-cache"
            ) from error
        user = os.getuid()
        logger.warning(
            f"user {user} may not write to {self._cache_dir}: {self._repo_id} is kept in "
            f"{elsewhere}, which ends with the container if this is one; `chown {user}` the "
            "directory on its disk, or run as its owner (--user)"
        )
        self._cache_dir = elsewhere

    def _cached_snapshot(self) -> Path | None:
        """The snapshot of this revision; None if the cache lacks weights."""
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(
            self._repo_id, "config.json", cache_dir=self._cache_dir, revision=self._revision
        )
        if not isinstance(config, str):
            return None
        try:
            check_directory(Path(config).parent)
        except ModelError:
            return None  # an interrupted download, which is completed now
        return Path(config).parent

    def _list_files(self) -> tuple[str, Mapping[str, int]]:
        """The commit of the revision, and the sizes of its top-level files."""
        info = self._api.model_info(
            self._repo_id, revision=self._revision, files_metadata=True, timeout=HUB_TIMEOUT_S
        )
        if info.sha is None:
            raise ModelError(f"the hub names no commit for {self._repo_id}: try again later")
        files = [(file.rfilename, file.size or 0) for file in info.siblings or ()]
        return info.sha, {name: size for name, size in files if "/" not in name}

    def _complete(self, commit: str, sizes: Mapping[str, int], cached: Path | None) -> Path:
        """Download missing files: small ones first, so that a snapshot with all weights is
        complete; the reference last, so that it always names a complete snapshot."""
        folder = self._cache_dir / f"models--{self._repo_id.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        check_config(self._repo_id, sizes)
        small = _absent(snapshot, (name for name in sizes if name.endswith(SMALL_SUFFIXES)))
        self._download(snapshot, small)
        weights = _absent(snapshot, weight_names(self._repo_id, sizes, snapshot))
        if (snapshot / CONVERTED_NAME).exists():
            # The user may have deleted converted pickles.
            weights = [name for name in weights if not name.endswith(PICKLE_SUFFIXES)]
        if not small and not weights and snapshot == cached:
            return _found(snapshot)
        _delete_stale(folder / "blobs")
        needed, free = sum(sizes[name] for name in weights), shutil.disk_usage(folder).free
        if needed > free:
            raise ModelError(
                f"{self._repo_id} needs another {_size(needed)} and the disk of "
                f"{self._cache_dir} has {_size(free)} left: free some, or choose another "
                "disk with --huggingface-hub-cache"
            )
        what = weights[0] if len(weights) == 1 else f"{len(weights)} weight files"
        with _progress(folder / "blobs", what, needed):
            self._download(snapshot, weights)
        reference = folder / "refs" / self._revision
        if commit != self._revision:
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)
        logger.info("downloaded %s to %s", self._repo_id, snapshot)
        return snapshot

    def _download(self, snapshot: Path, names: list[str]) -> None:
        from huggingface_hub import snapshot_download

        if names:
            snapshot_download(
                self._repo_id,
                revision=snapshot.name,
                cache_dir=self._cache_dir,
                endpoint=self._api.endpoint,
                allow_patterns=names,
            )
        # Where the hub can not be asked again, older versions return what there is.
        if absent := _absent(snapshot, names):
            raise ModelError(
                f"{absent[0]} of {self._repo_id} has not arrived: check the network and start again"
            )

    def _explained(self, error: Exception) -> ModelError:
        """What was wrong and what to do, in one line."""
        if isinstance(error, ModelError):
            return error
        model, cache, hub = self._repo_id, self._cache_dir, self._api.endpoint
        reason = (str(error) or type(error).__name__).splitlines()[0]
        known = [_HUB_ERRORS.get(kind.__name__) for kind in type(error).__mro__]
        status = getattr(getattr(error, "response", None), "status_code", None)
        number = error.errno if isinstance(error, OSError) else None
        if text := next(filter(None, known), None):
            text = text.format(model=model, cache=cache, hub=hub, revision=self._revision)
        elif status in (401, 403):
            text = (
                f"the hub refused the access to {model} (status {status}): set HF_TOKEN to a valid "
                "token that may read it"
            )
        elif status is not None:
            text = f"the hub answered with status {status} for {model}: try again later"
        elif number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in reason:
            text = (
                f"the disk of {cache} is full: free some space and start again, the files that "
                "have arrived are kept; or choose another disk with --huggingface-hub-cache"
            )
        elif isinstance(error, OSError) and error.filename is not None:
            text = (
                f"cannot write {error.filename}: {error.strerror}: choose a directory that can be "
                "written with --huggingface-hub-cache"
            )
        else:
            text = (
                f"cannot download {model} from {hub} ({reason}): check the network and start "
                "again, or give --model-id a directory"
            )
        return ModelError(text)


@contextmanager
def _progress(blobs: Path, what: str, total: int) -> Iterator[None]:
    """Log how much of the files that are downloaded into `blobs` from now on has arrived."""
    before = {path.name for path in blobs.glob("*")}
    is_done = threading.Event()

    def follow() -> None:
        while not is_done.wait(PROGRESS_S):
            arrived = 0
            for path in blobs.glob("*"):
                with suppress(FileNotFoundError):  # just renamed or deleted
                    arrived += path.stat().st_size if path.name not in before else 0
            logger.info("downloading %s: %s", what, _size(arrived, total))

    logger.info("downloading %s: %s", what, _size(0, total))
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _delete_stale(blobs: Path) -> None:
    """Delete what killed downloads have left: huggingface_hub never reads it again."""
    for path in blobs.glob("*.incomplete"):
        with suppress(OSError):  # a download that was alive has just ended
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _absent(directory: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if not (directory / name).exists()]


def _can_be_written(cache_dir: Path) -> bool:
    """Whether permissions let this user create the directory."""
    there = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    return not there.is_dir() or os.access(there, os.W_OK | os.X_OK)


def _found(snapshot: Path) -> Path:
    logger.info("found in the hub cache: %s", snapshot)
    return snapshot


def _size(count: int, of: int | None = None) -> str:
    """`1.2 GB`, `3.4 MB`, or `1.2 of 4.9 GB`."""
    unit, scale = ("GB", 1e9) if (of or count) >= 1e9 else ("MB", 1e6)
    total = "" if of is None else f" of {of / scale:.1f}"
    return f"{count / scale:.1f}{total} {unit}"


def _ensure_tokenizer(directory: Path) -> None:
    """Make the tokenizer.json, which the router needs, from a slow tokenizer if it is missing."""
    if (directory / TOKENIZER_NAME).exists():
        return
    slow = [name for name in SLOW_TOKENIZERS if (directory / name).exists()]
    if not slow:
        raise ModelError(
            f"{directory} has no tokenizer: put the model's {TOKENIZER_NAME} beside its weights"
        )
    logger.info("converting %s to %s", slow[0], TOKENIZER_NAME)
    try:
        with tempfile.TemporaryDirectory() as converted:
            # Takes seconds to import.
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            tokenizer.save_pretrained(converted)
            target = directory / f"{TOKENIZER_NAME}.{os.getpid()}"
            shutil.copyfile(Path(converted) / TOKENIZER_NAME, target)
            os.replace(target, directory / TOKENIZER_NAME)  # atomic
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{directory} has no {TOKENIZER_NAME} and {slow[0]} can't be converted to it "
            f"({reason}): make it with transformers, AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)"
        ) from error
