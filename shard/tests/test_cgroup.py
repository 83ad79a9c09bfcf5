"""The free memory of control groups, and a model larger than it."""

from pathlib import Path

import pytest
from text_generation_shard.checkpoint.partition import whole
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device.cpu import cgroup
from text_generation_shard.device.cpu.cgroup import MemoryLimit, memory_limit
from text_generation_shard.errors import ModelError

from shard.tests.driver import open_cpu

GB = 10**9
STAT = "anon 5\ninactive_file 300000000\nactive_file 100000000\ntotal_inactive_file 7\n"


def limit_of(root: Path, own: str, files: dict[str, str]) -> MemoryLimit | None:
    """Create files for /sys/fs/cgroup and a /proc/self/cgroup."""
    for name, text in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "self").write_text(own)
    return memory_limit(root / "sys", root / "self")


def test_version_2_counts_file_pages_as_free(tmp_path: Path) -> None:
    files = {"memory.max": f"{2 * GB}\n", "memory.current": f"{GB}\n", "memory.stat": STAT}
    assert limit_of(tmp_path, "0::/\n", files) == MemoryLimit(2 * GB, 1_400_000_000)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{2 * GB}\n",
        "memory/memory.usage_in_bytes": f"{GB}\n",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2\ntotal_active_file 3\n",
    }
    own = "5:cpu,cpuacct:/else\n4:memory:/docker/abc\n0::/\n"
    assert limit_of(tmp_path, own, files) == MemoryLimit(2 * GB, GB + 5)


def test_the_tightest_of_all_groups_above(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{2 * GB}",
        "pod/memory.current": "0",
        "pod/container/memory.max": "max",
        "pod/container/memory.current": "0",
        "other/memory.max": "1",
        "other/memory.current": "0",
    }
    assert limit_of(tmp_path, "0::/pod/container\n", files) == MemoryLimit(2 * GB, 2 * GB)


def test_no_limit(tmp_path: Path) -> None:
    files = {"memory.max": "max\n", "memory.current": "1\n"}
    assert limit_of(tmp_path, "0::/\n", files) is None
    assert memory_limit(tmp_path, tmp_path / "none") is None


@pytest.fixture
def half_a_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_limit", lambda: MemoryLimit(GB, GB // 2))


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
