"""The limits of this process's control groups, including those of a container."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of one control group, in bytes."""

    limit: int
    # The part of the limit that the processes of the group do not use yet.
    free: int


def folders(controller: str, groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> list[Path]:
    """The visible folders of this process's groups, from the innermost to the root. `controller` is
    a controller's name in cgroup version 1."""
    if not own_groups.exists():
        return []
    found = []
    for line in own_groups.read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one unnamed tree, version 1 one tree per controller.
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        group = root / path.lstrip("/")
        # In a container, the path may be the host's, of which only the root is visible.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            found.append(folder)
    return found


def memory_limit(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> MemoryLimit | None:
    """The limit with the least free memory; None: no limit is set."""
    limits = [
        limit
        for folder in folders("memory", groups, own_groups)
        for limit in _memory_limits(folder)
    ]
    return min(limits, key=lambda limit: limit.free, default=None)


def _memory_limits(folder: Path) -> Iterator[MemoryLimit]:
    # Version 2, then version 1.
    for limit_name, used_name, stat_prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            cached = _file_cache(folder / "memory.stat", stat_prefix)
            yield MemoryLimit(limit, max(0, limit - used + cached))


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of the page cache, which count as used but are reclaimed when memory is short."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = stat.read_text(encoding="ascii").splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in names)


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else None
