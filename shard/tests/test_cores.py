"""How many threads compute, from affinity and from the quotas of both versions of cgroups."""

import os
from pathlib import Path

import pytest
from text_generation_shard.device.cpu.cores import num_compute_threads


@pytest.fixture
def bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def threads(root: Path, own: str, files: dict[str, str], num_ranks: int = 1) -> int:
    """With these files under /sys/fs/cgroup and this /proc/self/cgroup."""
    for name, text in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "self").write_text(own)
    return num_compute_threads(num_ranks, root / "sys", root / "self")


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 7), (64, 63)])
def test_of_many_cores_one_is_left(
    cores: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_compute_threads(1, tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max", 7), ("50000", 1), ("150000", 1), ("200000", 2), ("390000", 3), ("400000", 3)],
)
@pytest.mark.usefixtures("bound_to")
def test_quota_of_version_2(quota: str, expected: int, tmp_path: Path) -> None:
    assert threads(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"}) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 7), ("250000", 2), ("10000", 1)])
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.usefixtures("bound_to")
def test_quota_of_version_1(controllers: str, quota: str, expected: int, tmp_path: Path) -> None:
    own = f"5:memory:/else\n4:{controllers}:/\n"
    files = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert threads(tmp_path, own, files) == expected


@pytest.mark.usefixtures("bound_to")
def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    files = {
        "cpu.max": "700000 100000",
        "system.slice/cpu.max": "200000 100000",
        "system.slice/a.service/cpu.max": "max 100000",
        "other.slice/cpu.max": "100000 100000",
    }
    assert threads(tmp_path, "0::/system.slice/a.service\n", files) == 2


@pytest.mark.usefixtures("bound_to")
def test_in_a_container_only_the_root_is_seen(tmp_path: Path) -> None:
    own = "0::/kubepods/pod1/container1\n"
    assert threads(tmp_path, own, {"cpu.max": "300000 100000"}) == 3
    assert threads(tmp_path, "0::/../../else\n", {"cpu.max": "300000 100000"}) == 3
