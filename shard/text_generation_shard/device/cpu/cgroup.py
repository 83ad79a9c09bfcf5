"""What the control groups above this process, those of a container among them, let it have."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory of one control group, in bytes."""

    limit: int
    # Of the limit, what is left for this process and its neighbours in the group.
    free: int


def folders(controller: str, groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> list[Path]:
    """The folders of the groups this process is in, from the innermost to the root, as far as they
    can be seen here: `controller` is their name in version 1 of the interface."""
    if not own_groups.exists():
        return []
    found = []
    for line in own_groups.read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one tree without a name, version 1 one for each controller.
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        group = root / path.lstrip("/")
        # In a container the path may be that of the host, of which only the root is seen here.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            found.append(folder)
    return found


def memory_limit(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> MemoryLimit | None:
    """The one that leaves the least; None: none is set."""
    limits = [
        limit
        for folder in folders("memory", groups, own_groups)
        for limit in _memory_limits(folder)
    ]
    return min(limits, key=lambda limit: limit.free, default=None)


def _memory_limits(folder: Path) -> Iterator[MemoryLimit]:
    # Version 2 of the interface, then version 1.
    for limit_name, used_name, stat_prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            cached = _file_cache(folder / "memory.stat", stat_prefix)
            yield MemoryLimit(limit, max(0, limit - used + cached))


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of file pages, which the kernel counts as used but gives up when memory is short."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = stat.read_text(encoding="ascii").splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in names)


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else None
