"""Explains errors between this machine and the hub."""

import errno
from pathlib import Path


def explain(error: Exception, repo_id: str, revision: str, hub: str, cache_dir: Path) -> str:
    """What was wrong and what to do, in one line; `hub`: the hub's address."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo_id} is gated: accept its conditions at {hub}/{repo_id} and set HF_TOKEN to a "
            "token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{repo_id} has no revision {revision}: give --revision a branch, a tag or a commit "
            f"that {hub}/{repo_id} lists"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no model {repo_id}, or it is private: check the spelling of --model-id, "
            "or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{repo_id} is not a hub id: give one like Qwen/Qwen2.5-0.5B-Instruct"
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error.response.status_code, repo_id)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{repo_id} is not complete in the hub cache {cache_dir}, and HF_HUB_OFFLINE forbids "
            "to download it: unset HF_HUB_OFFLINE or give --model-id a directory"
        )
    if isinstance(error, OSError) and (error.filename is not None or _is_full(error)):
        return _explain_disk(error, cache_dir)
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return (
        f"cannot download {repo_id} from {hub} ({reason}): check the network and start again, or "
        "give --model-id a directory"
    )


def _explain_status(status: int, repo_id: str) -> str:
    if status in (401, 403):
        return (
            f"the hub refused the access to {repo_id} (status {status}): set HF_TOKEN to a valid "
            "token that may read it"
        )
    return f"the hub answered with status {status} for {repo_id}: try again later"


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _explain_disk(error: OSError, cache_dir: Path) -> str:
    if _is_full(error):
        return (
            f"the disk of {cache_dir} is full: free some space and start again, the download goes "
            "on where it stopped; or choose another disk with --huggingface-hub-cache"
        )
    return (
        f"cannot write {error.filename}: {error.strerror}: choose a directory that can be written "
        "with --huggingface-hub-cache"
    )
