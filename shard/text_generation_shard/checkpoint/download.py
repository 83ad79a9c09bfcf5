"""Finds the files of a model: in a local directory, in the hub cache, or on the hub.

Weights are downloaded over plain HTTP into `blobs/<etag>.resumable` of the hub cache, and an
interrupted download is resumed. huggingface_hub manages the rest of the cache.
"""

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from text_generation_shard.checkpoint import pickles
from text_generation_shard.checkpoint.hub_error import explain
from text_generation_shard.trusted_folders import temporary_folder

logger = logging.getLogger(__name__)

INDEX_NAME, TOKENIZER_NAME = "model.safetensors.index.json", "tokenizer.json"
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SMALL_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
OTHER_WEIGHTS = (*pickles.SUFFIXES, ".gguf", ".h5", ".msgpack", ".onnx")
HUB_TIMEOUT_S, PROGRESS_S, PARALLEL_FILES = 10.0, 3.0, 4
# The hub serves larger files only through huggingface_hub's own transfer, which can not resume.
MAX_HTTP_BYTES = 50 * 10**9
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class DownloadError(ValueError):
    """Why there is no model to serve: what was wrong, what was expected, what to do."""


def resolve_model(
    model_id: str,
    revision: str | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The directory of `model_id`, downloaded if it is not on this machine.

    A directory of that name takes precedence over the hub. `endpoint`: the hub's address; None:
    that of huggingface_hub. Raises DownloadError.
    """
    directory = Path(model_id).expanduser()
    if model_id and directory.is_dir():
        logger.info("using local directory %s", directory)
        if revision is not None:
            logger.info("the revision %s has no effect on a local directory", revision)
        _check_directory(directory)
        _make_loadable(directory)
        return directory
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model_id):
        raise DownloadError(
            f"{model_id} is neither a directory here nor a hub id: give a directory that holds "
            "config.json and the weights, or a hub id like Qwen/Qwen2.5-0.5B-Instruct"
        )
    directory = _HubModel(model_id, revision or "main", cache_dir, endpoint).fetch()
    _make_loadable(directory)
    return directory


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """A file of the repository; `etag` names its blob in the hub cache."""

    name: str
    size: int
    etag: str

    @property
    def is_resumable(self) -> bool:
        is_large = self.name.endswith((".safetensors", *pickles.SUFFIXES))
        return is_large and self.size <= MAX_HTTP_BYTES


class _Stopped(Exception):
    """Ends this download because that of another file has failed."""


class _PartialFile(io.BufferedWriter):
    """The downloaded part of a file, locked by this process. `stop` makes the next write fail."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._stop = stop
        try:
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is downloading %s: waiting for it", path.stem)
            fcntl.flock(self, fcntl.LOCK_EX)
        self.seek(0, os.SEEK_END)  # another process may have written meanwhile

    def write(self, data: "io._ReadableBuffer") -> int:  # type: ignore[name-defined]
        """Write all data, or raise _Stopped."""
        if self._stop.is_set():
            raise _Stopped
        return super().write(data)


def _elsewhere() -> Path:
    """A private directory for weights if the cache is not writable."""
    try:
        return temporary_folder("huggingface")
    except OSError as error:
        raise DownloadError(
            f"{error}; or choose a cache that can be written with --huggingface-hub-cache"
        ) from error


class _HubModel:
    """One revision of a repository in the hub cache."""

    def __init__(
        self, repo_id: str, revision: str, cache_dir: Path | None, endpoint: str | None
    ) -> None:
        # Imported here because the import is slow and local directories do not need it.
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        for chatty in ("httpx", "httpx2", "urllib3"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._repo_id = repo_id
        self._revision = revision
        self._api = HfApi(endpoint=endpoint)
        self._stop = threading.Event()
        self._use(Path(cache_dir or constants.HF_HUB_CACHE).expanduser())

    def _use(self, cache_dir: Path) -> None:
        """Use this hub cache."""
        self._cache_dir = cache_dir
        self._blobs = cache_dir / f"models--{self._repo_id.replace('/', '--')}" / "blobs"

    def fetch(self) -> Path:
        """The complete snapshot of the model; raises DownloadError."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        cached = self._cached_snapshot()
        if cached is None and not _can_be_written(self._cache_dir):
            elsewhere = _elsewhere()
            logger.warning(
                "user %d may not write to %s: %s is kept in %s, which ends with the container if "
                "this is one; `chown %d` the directory on its disk, or run as its owner (--user)",
                *(os.getuid(), self._cache_dir, self._repo_id, elsewhere, os.getuid()),
            )
            self._use(elsewhere)
            cached = self._cached_snapshot()
        if cached is not None and cached.name == self._revision:
            return _found(cached)  # a commit never changes, so the hub is not queried
        try:
            commit, files = self._list_files()
        except Exception as error:
            if cached is None:
                raise self._explained(error) from error
            if not isinstance(error, OfflineModeIsEnabled):
                logger.info("%s", self._explained(error))
            return _found(cached)
        try:
            return self._complete(commit, files, cached)
        except Exception as error:
            if cached is not None and isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
                logger.info("%s", self._explained(error))
                return _found(cached)
            raise self._explained(error) from error

    def _cached_snapshot(self) -> Path | None:
        """The snapshot of this revision; None if the cache lacks weights."""
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(
            self._repo_id, "config.json", cache_dir=self._cache_dir, revision=self._revision
        )
        if not isinstance(config, str):
            return None
        snapshot = Path(config).parent
        try:
            _check_directory(snapshot)
        except DownloadError:
            return None  # an interrupted download, which is completed now
        return snapshot

    def _list_files(self) -> tuple[str, Mapping[str, _RemoteFile]]:
        """The commit of the revision, and its top-level files."""
        info = self._api.model_info(
            self._repo_id, revision=self._revision, files_metadata=True, timeout=HUB_TIMEOUT_S
        )
        files = {
            sibling.rfilename: _RemoteFile(
                sibling.rfilename,
                sibling.size or 0,
                sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or "",
            )
            for sibling in info.siblings or ()
            if "/" not in sibling.rfilename
        }
        if info.sha is None:
            raise DownloadError(f"the hub names no commit for {self._repo_id}: try again later")
        return info.sha, files

    def _complete(self, commit: str, files: Mapping[str, _RemoteFile], cached: Path | None) -> Path:
        """Download missing files: small ones first, so that a snapshot with all weights is
        complete; the reference last, so that it always names a complete snapshot."""
        snapshot = self._blobs.parent / "snapshots" / commit
        _check_repository(self._repo_id, files)
        small = [file for file in files.values() if file.name.endswith(SMALL_SUFFIXES)]
        absent = [file for file in small if not (snapshot / file.name).exists()]
        self._download(commit, absent)
        weights = [files[name] for name in _weight_names(self._repo_id, files, snapshot)]
        absent_weights = [file for file in weights if not (snapshot / file.name).exists()]
        if (snapshot / pickles.CONVERTED_NAME).exists():
            # The user may have deleted converted pickles.
            absent_weights = [
                file for file in absent_weights if not file.name.endswith(pickles.SUFFIXES)
            ]
        if not absent and not absent_weights and snapshot == cached:
            return _found(snapshot)
        self._check_space(absent_weights)
        self._download(commit, absent_weights)
        reference = self._blobs.parent / "refs" / self._revision
        if commit != self._revision:
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)
        logger.info("downloaded %s to %s", self._repo_id, snapshot)
        return snapshot

    def _check_space(self, files: Iterable[_RemoteFile]) -> None:
        needed = sum(file.size - self._arrived(file) for file in files)
        free = shutil.disk_usage(self._blobs.parent).free
        if needed > free:
            raise DownloadError(
                f"{self._repo_id} needs another {_size(needed)} and the disk of "
                f"{self._cache_dir} has {_size(free)} left: free some, or choose another "
                "disk with --huggingface-hub-cache"
            )

    def _download(self, commit: str, files: Collection[_RemoteFile]) -> None:
        """Download several files in parallel, and log the progress."""
        with ThreadPoolExecutor(PARALLEL_FILES) as pool:
            futures = {pool.submit(self._download_one, commit, file): file for file in files}
            try:
                self._follow(futures)
            finally:
                self._stop.set()  # after a failure, stop the other downloads
        self._stop.clear()

    def _follow(self, futures: Mapping["Future[None]", _RemoteFile]) -> None:
        """Wait for all files; raises the first error."""
        pending = set(futures)
        weights = [file for file in futures.values() if file.is_resumable]
        total = sum(file.size for file in weights)
        what = weights[0].name if len(weights) == 1 else f"{len(weights)} weight files"
        while pending:
            if weights:
                arrived = sum(self._arrived(file) for file in weights)
                logger.info("downloading %s: %s", what, _size(arrived, total))
            done, pending = wait(pending, PROGRESS_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()

    def _arrived(self, file: _RemoteFile) -> int:
        """The downloaded bytes of a file."""
        if (self._blobs / file.etag).exists():
            return file.size
        try:
            return self._partial_path(file).stat().st_size
        except FileNotFoundError:
            return 0  # not begun, or just deleted by its thread

    def _partial_path(self, file: _RemoteFile) -> Path:
        return self._blobs / f"{file.etag}.resumable"

    def _download_one(self, commit: str, file: _RemoteFile) -> None:
        from huggingface_hub import hf_hub_download

        if file.is_resumable and not (self._blobs / file.etag).exists():
            self._download_resumably(commit, file)
        # For an existing blob this only adds the link in the snapshot.
        hf_hub_download(
            self._repo_id,
            file.name,
            revision=commit,
            cache_dir=self._cache_dir,
            endpoint=self._api.endpoint,
        )

    def _download_resumably(self, commit: str, file: _RemoteFile) -> None:
        from huggingface_hub import get_token, hf_hub_url
        from huggingface_hub.file_download import http_get

        token = get_token()
        self._blobs.mkdir(parents=True, exist_ok=True)
        path = self._partial_path(file)
        with _PartialFile(path, self._stop) as partial:
            if (self._blobs / file.etag).exists():
                return  # another process has downloaded it meanwhile
            if partial.tell() > file.size:
                partial.truncate(0)  # too long to be a part of this file
            if arrived := partial.seek(0, os.SEEK_END):
                logger.info("resuming %s at %s", file.name, _size(arrived, file.size))
            http_get(
                hf_hub_url(self._repo_id, file.name, revision=commit, endpoint=self._api.endpoint),
                partial,
                resume_size=arrived,
                headers={"authorization": f"Bearer {token}"} if token else {},
                expected_size=file.size,
            )
            partial.flush()
            self._check_content(path, file)
            os.replace(path, self._blobs / file.etag)

    @staticmethod
    def _check_content(path: Path, file: _RemoteFile) -> None:
        if len(file.etag) != 64:
            return  # only the etags of large files are hashes of their content
        with path.open("rb") as content:
            actual = hashlib.file_digest(content, "sha256").hexdigest()
        if actual != file.etag:
            path.unlink()
            raise DownloadError(
                f"{file.name} arrived damaged and was deleted: start again to download it again"
            )

    def _explained(self, error: Exception) -> DownloadError:
        if isinstance(error, DownloadError):
            return error
        hub = self._api.endpoint
        return DownloadError(explain(error, self._repo_id, self._revision, hub, self._cache_dir))


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


def _check_repository(repo_id: str, names: Collection[str]) -> None:
    """DownloadError if these files can not be a model."""
    if "config.json" not in names:
        adapter = " (it is a LoRA adapter)" if "adapter_config.json" in names else ""
        raise DownloadError(
            f"{repo_id} has no config.json{adapter}: choose a repository with a transformers model"
        )
    if not any(name.endswith(".safetensors") for name in names) and not pickles.are_all(names):
        raise DownloadError(_no_safetensors(repo_id, names))


def _no_safetensors(where: str, names: Iterable[str]) -> str:
    others = sorted(name for name in names if name.endswith(OTHER_WEIGHTS))
    there = f"only {', '.join(others[:3])}" if others else "no weights at all"
    return (
        f"{where} holds {there}, and pytgi loads *.safetensors: convert the checkpoint with "
        "transformers (save_pretrained) or choose another one"
    )


def _weight_names(where: str, names: Collection[str], directory: Path) -> list[str]:
    """The weight files of a model: those in its index, else `model.safetensors`, else all but
    `consolidated`, which is a copy under other names; pickles only if it has nothing else."""
    are_pickled = pickles.are_all(names)
    index_name = pickles.INDEX_NAME if are_pickled else INDEX_NAME
    if index_name in names:
        try:
            index = json.loads((directory / index_name).read_text(encoding="utf-8"))
            wanted = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DownloadError(
                f"{index_name} of {where} is not an index of weights ({error}): download it again"
            ) from error
        absent = [name for name in wanted if name not in names]
        if absent:
            raise DownloadError(
                f"{where} lacks weight files that its index names: {', '.join(absent[:3])}"
                f"{f' and {len(absent) - 3} more' if len(absent) > 3 else ''}: complete it"
            )
        return wanted
    if are_pickled:
        return pickles.weight_names(names)
    if "model.safetensors" in names:
        return ["model.safetensors"]
    weights = [name for name in names if name.endswith(".safetensors")]
    return [name for name in weights if not name.startswith("consolidated")] or weights


def _check_directory(directory: Path) -> None:
    """DownloadError unless the directory has a configuration and all weights."""
    names = {path.name for path in directory.iterdir() if path.exists()}
    _check_repository(str(directory), names)
    _weight_names(str(directory), names, directory)


def _make_loadable(directory: Path) -> None:
    """Convert pickled weights and a slow tokenizer, if there is nothing better."""
    names = {path.name for path in directory.iterdir() if path.exists()}
    if pickles.are_all(names):
        pickles.convert(directory, _weight_names(str(directory), names, directory))
    _ensure_tokenizer(directory)


def _ensure_tokenizer(directory: Path) -> None:
    """Make the tokenizer.json, which the router needs, from a slow tokenizer if it is missing."""
    if (directory / TOKENIZER_NAME).exists():
        return
    slow = [name for name in SLOW_TOKENIZERS if (directory / name).exists()]
    if not slow:
        raise DownloadError(
            f"{directory} has no tokenizer: put the model's {TOKENIZER_NAME} beside its weights"
        )
    logger.info("converting %s to %s", slow[0], TOKENIZER_NAME)
    try:
        with tempfile.TemporaryDirectory() as converted:
            _convert_tokenizer(directory, Path(converted))
            target = directory / f"{TOKENIZER_NAME}.{os.getpid()}"
            shutil.copyfile(Path(converted) / TOKENIZER_NAME, target)
            os.replace(target, directory / TOKENIZER_NAME)  # atomic
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"{directory} has no {TOKENIZER_NAME} and {slow[0]} can't be converted to it "
            f"({reason}): make it with transformers, AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)"
        ) from error


def _convert_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.save_pretrained(target)
