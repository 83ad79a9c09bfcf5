"""The machine of a process: cores and memory within control groups of versions 1 and 2."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from text_generation_shard.checkpoint.partition import whole
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device.cpu import host
from text_generation_shard.device.cpu.host import (
    MemoryLimit,
    memory_limit,
    num_compute_threads,
    processors_of,
    read_cores,
)
from text_generation_shard.errors import ModelError

from shard.tests.driver import open_cpu


def write_groups(root: Path, own: str, files: dict[str, str]) -> None:
    """Create files for /sys/fs/cgroup and a /proc/self/cgroup."""
    for name, text in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "self").write_text(own)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 7), (64, 63)])
def test_of_many_cores_one_is_left(
    cores: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_compute_threads(1, tmp_path, tmp_path / "none") == expected


NESTED = {
    "cpu.max": "700000 100000",
    "system.slice/cpu.max": "200000 100000",
    "system.slice/a.service/cpu.max": "max 100000",
    "other.slice/cpu.max": "100000 100000",
}
SIX = {"cpu.max": "600000 100000"}
VERSION_1 = "5:memory:/else\n4:cpu:/\n"
WITH_ACCOUNTS = "5:memory:/else\n4:cpu,cpuacct:/\n"


def version_1(quota: int) -> dict[str, str]:
    return {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "files", "num_ranks", "expected"),
    [
        *(
            ("0::/\n", {"cpu.max": f"{quota} 100000\n"}, 1, expected)
            for quota, expected in [("max", 7), (50_000, 1), (150_000, 1), (390_000, 3)]
        ),
        (VERSION_1, version_1(-1), 1, 7),
        (WITH_ACCOUNTS, version_1(250_000), 1, 2),
        (VERSION_1, version_1(10_000), 1, 1),
        # The least of all groups above.
        ("0::/system.slice/a.service\n", NESTED, 1, 2),
        # In a container only the root is seen.
        ("0::/kubepods/pod1/container1\n", SIX, 1, 5),
        ("0::/../../else\n", SIX, 1, 5),
        # Ranks share a quota.
        ("0::/\n", SIX, 2, 3),
        ("0::/\n", SIX, 4, 1),
    ],
)
def test_threads_are_bounded_by_quotas(
    own: str,
    files: dict[str, str],
    num_ranks: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    write_groups(tmp_path, own, files)
    assert num_compute_threads(num_ranks, tmp_path / "sys", tmp_path / "self") == expected


def machine(root: Path, nodes: int, cores: int, threads: int) -> Path:
    """A fake /sys/devices/system with nodes and cores, numbered as by Linux: the first threads of
    all cores, then the second ones."""
    total = nodes * cores
    for number in range(total * threads):
        core = number % total
        siblings = ",".join(str(core + total * thread) for thread in range(threads))
        folder = root / f"cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    for node in range(nodes):
        first = [node * cores + total * thread for thread in range(threads)]
        folder = root / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(f"{one}-{one + cores - 1}" for one in first))
    (root / "node").mkdir(exist_ok=True)
    (root / "node/online").write_text("0")
    return root


@pytest.mark.parametrize(
    ("shape", "allowed", "expected"),
    [
        # One node without and with second threads of cores.
        ((1, 4, 1), range(4), [{0, 1}, {2, 3}]),
        ((1, 4, 2), range(8), [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        ((1, 4, 2), range(8), [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        # Remaining cores are unused: all ranks wait for the slowest.
        ((1, 5, 1), range(5), [{0, 1}, {2, 3}]),
        # A rank has one node, several nodes, or a part of a node.
        ((2, 2, 2), range(8), [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        ((4, 1, 1), range(4), [{0, 1}, {2, 3}]),
        ((2, 2, 1), range(4), [{0}, {1}, {2}, {3}]),
        # Three ranks on two nodes: nodes are ignored.
        ((2, 3, 1), range(6), [{0, 1}, {2, 3}, {4, 5}]),
        # Only the processors that this process may use count.
        ((2, 4, 1), [1, 2, 6, 7], [{1, 2}, {6, 7}]),
        ((1, 4, 2), [0, 1, 4], [{0, 4}, {1}]),
        # Fewer cores than ranks but enough threads; and too few threads.
        ((1, 2, 2), range(4), [{0}, {1}, {2}, {3}]),
        ((1, 2, 1), range(2), [set(), set(), set()]),
        # A system without topology.
        ((0, 0, 0), range(4), [{0, 1}, {2, 3}]),
    ],
)
def test_ranks_have_cores_of_their_own(
    shape: tuple[int, int, int], allowed: Iterable[int], expected: list[set[int]], tmp_path: Path
) -> None:
    cores = read_cores(list(allowed), machine(tmp_path, *shape))
    found = [processors_of(rank, len(expected), cores) for rank in range(len(expected))]
    assert found == expected


@pytest.fixture
def no_nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[set[int]]:
    """The environment of a process on two cores without a GPU; its affinity comes last."""
    bound: list[set[int]] = [{0, 1}]
    monkeypatch.setattr(host, "_NVIDIA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: bound.append(set(own)))
    return bound


def test_a_rank_of_a_processor_is_bound_before_its_threads_start(
    no_nvidia: list[set[int]],
) -> None:
    environment: dict[str, str] = {}
    host.prepare_process(environment, rank=1, num_ranks=2, device="cpu")
    assert no_nvidia[-1] == {1} and environment["OMP_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_more_ranks_than_cores_are_warned_of(
    no_nvidia: list[set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(3):
        environment: dict[str, str] = {}
        host.prepare_process(environment, rank, num_ranks=3, device="cpu")
        assert no_nvidia == [{0, 1}] and environment["OMP_NUM_THREADS"] == "1"
    assert [record.getMessage() for record in caplog.records] == [
        "3 shards share 2 cores, and wait for each other: use fewer shards"
    ]


def test_one_rank_is_left_alone(no_nvidia: list[set[int]]) -> None:
    host.prepare_process({}, 0, 1, "cpu")
    assert no_nvidia == [{0, 1}]


@pytest.mark.parametrize(
    ("visible", "rank", "expected"),
    [(None, 1, "1"), ("", 1, ""), ("4,7", 1, "7"), ("GPU-a, GPU-b", 0, "GPU-a")],
)
@pytest.mark.usefixtures("no_nvidia")
def test_a_rank_sees_one_gpu(visible: str | None, rank: int, expected: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    host.prepare_process(environment, rank, 2, "cuda")
    assert environment["CUDA_VISIBLE_DEVICES"] == expected


def test_a_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(ModelError, match=r"shard 2 has no GPU: CUDA_VISIBLE_DEVICES names 2 \(0,1"):
        host.prepare_process({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 3, "cuda")


GB = 10**9
STAT = "anon 5\ninactive_file 300000000\nactive_file 100000000\ntotal_inactive_file 7\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        # File pages count as free.
        (
            "0::/\n",
            {"memory.max": f"{2 * GB}\n", "memory.current": f"{GB}\n", "memory.stat": STAT},
            MemoryLimit(2 * GB, 1_400_000_000),
        ),
        (
            "5:cpu,cpuacct:/else\n4:memory:/docker/abc\n0::/\n",
            {
                "memory/memory.limit_in_bytes": f"{2 * GB}\n",
                "memory/memory.usage_in_bytes": f"{GB}\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2\n",
            },
            MemoryLimit(2 * GB, GB + 2),
        ),
        # The tightest of all groups above.
        (
            "0::/pod/container\n",
            {
                **{"pod/memory.max": f"{2 * GB}", "pod/memory.current": "0"},
                **{"pod/container/memory.max": "max", "pod/container/memory.current": "0"},
                **{"other/memory.max": "1", "other/memory.current": "0"},
            },
            MemoryLimit(2 * GB, 2 * GB),
        ),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "1\n"}, None),
    ],
)
def test_memory_limits(
    own: str, files: dict[str, str], expected: MemoryLimit | None, tmp_path: Path
) -> None:
    write_groups(tmp_path, own, files)
    assert memory_limit(tmp_path / "sys", tmp_path / "self") == expected
    assert memory_limit(tmp_path, tmp_path / "none") is None


@pytest.fixture
def half_a_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_limit", lambda: MemoryLimit(GB, GB // 2))


def parameters(quantize: str | None, rows: int) -> Parameters:
    """A checkpoint of one matrix with rows x 1000 numbers, read in two parts."""
    made = Parameters(open_cpu("bfloat16"), quantize)
    sections = {"a": [whole(rows // 2)], "b": [whole(rows // 2)]}
    made.add_matrix(sections, whole(1000), made.device.matrix)  # type: ignore[arg-type]
    return made


@pytest.mark.usefixtures("half_a_gigabyte")
@pytest.mark.parametrize(
    ("quantize", "rows", "size"),
    [
        (None, 250_002, "0.50 GB in bfloat16"),
        ("int8", 600_000, "0.60 GB in int8"),
        ("fp8", 600_000, "0.60 GB in fp8"),
    ],
)
def test_weights_that_do_not_fit_are_refused_unread(
    quantize: str | None, rows: int, size: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError) as caught:
        parameters(quantize, rows).load(tmp_path)
    assert f"the weights take {size}" in str(caught.value)
    assert "memory limit of 1.00 GB" in str(caught.value)
    assert "0.50 GB are left: raise the limit, choose a smaller --dtype" in str(caught.value)


@pytest.mark.usefixtures("half_a_gigabyte")
@pytest.mark.parametrize(("quantize", "rows"), [(None, 250_000), ("int8", 500_000)])
def test_weights_that_fit_are_read(quantize: str | None, rows: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        parameters(quantize, rows).load(tmp_path)


def test_the_command_line_does_not_import_torch() -> None:
    """It reads the environment that `prepare_process` sets when it is imported."""
    code = "import sys, text_generation_shard.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
