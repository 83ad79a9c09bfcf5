"""How many threads are to compute: from the cores this process may really use."""

import os
from pathlib import Path

from text_generation_shard.device.cpu import cgroup

# From so many cores on, one is left to the router and the event loop: they then never push a thread
# aside while all others wait for it at the end of a kernel. Of fewer, a core is too much to give.
_CORES_TO_SPARE = 4


def num_compute_threads(
    cgroups: Path = cgroup.GROUPS, own_cgroups: Path = cgroup.OWN_GROUPS
) -> int:
    """Threads for the kernels: the cores this process is bound to, or what the quotas of its
    cgroups allow if that is less; one fewer where there are many.

    Quotas are rounded down: with 1.5 cores two threads would both stand still for a quarter of the
    time, and wherever one does the other waits.
    """
    whole = num_cores(cgroups, own_cgroups)
    return max(1, whole - 1 if whole >= _CORES_TO_SPARE else whole)


def num_cores(cgroups: Path = cgroup.GROUPS, own_cgroups: Path = cgroup.OWN_GROUPS) -> int:
    """Whole cores that this process may use; 0 if its quota is less than one."""
    cores = float(len(os.sched_getaffinity(0)))
    folders = cgroup.folders("cpu", cgroups, own_cgroups)
    quotas = [quota for folder in folders for quota in _quota_in(folder)]
    return int(min([cores, *quotas]))


def _quota_in(folder: Path) -> list[float]:
    """The quota of one cgroup, in the files of either version; empty: none."""
    both = folder / "cpu.max"
    if both.exists():
        quota, period = both.read_text(encoding="ascii").split()
        return [] if quota == "max" else [int(quota) / int(period)]
    files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if not all(file.exists() for file in files):
        return []
    quota, period = (file.read_text(encoding="ascii").strip() for file in files)
    return [] if quota == "-1" else [int(quota) / int(period)]
