"""Code for other processors: run if possible, else compiled and inspected.

`make processors` runs all tests of the shard so, and compiles all kernels.
"""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from text_generation_shard.device import open_device
from text_generation_shard.device.base import Activation, DeviceOptions
from text_generation_shard.device.cpu import device, kernels
from text_generation_shard.device.cpu.matrices import OneDnnMatrix, PackedWeight

from shard.tests.driver import open_cpu
from shard.tests.processors import (
    ARM,
    HASWELL,
    SAPPHIRE_RAPIDS,
    SKYLAKE,
    Processor,
    run_tests,
    write_code,
)

pytestmark = pytest.mark.slow

KERNELS = "shard/tests/device/cpu/kernels/test_kernels.py"
LAYERS = "shard/tests/device/cpu/kernels/test_layers.py::test_equals_one_by_one[llama3-form1]"
FEW_BITS = "shard/tests/device/cpu/kernels/test_bfloat12.py"
# In float32, Skylake's code is like that of any AVX-512 processor.
TESTED = {HASWELL: [KERNELS, LAYERS], SKYLAKE: [KERNELS, FEW_BITS, "-k", "not dtype0"]}
COMPILED = ["multiply_item", "attend_task"]


class Work(NamedTuple):
    """Results of child processes, all of which start with the first test that needs one."""

    tested: dict[Processor, Future[str]]
    written: dict[Processor, Future[str]]
    folders: dict[Processor, Path]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """Slowest first."""
    folders = {
        told: tmp_path_factory.mktemp(told.name)
        for told in (HASWELL, SKYLAKE, SAPPHIRE_RAPIDS, ARM)
    }
    with ThreadPoolExecutor(2) as pool:
        tested = {
            told: pool.submit(run_tests, told, tmp_path_factory.mktemp("cache"), arguments)
            for told, arguments in TESTED.items()
            if told.is_like_this_one
        }
        written = {
            told: pool.submit(write_code, told, folder, "bfloat16", COMPILED)
            for told, folder in folders.items()
        }
        yield Work(tested, written, folders)


def test_of_this_processor_it_is_known_what_torch_knows() -> None:
    assert kernels.is_x86() != kernels.is_arm()
    assert kernels.are_vectors_wide() == torch.cpu._is_avx512_supported()
    assert kernels.has_bfloat16_products() == torch.cpu._is_avx512_bf16_supported()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("told", "present", "absent"),
    [
        # Registers of 256 bits and of 512 bits; products and rounding of AVX512_BF16.
        (HASWELL, [r"vfmadd\w+ps.*%ymm"], ["zmm", "vdpbf16ps"]),
        (SKYLAKE, [r"vfmadd\w+ps.*%zmm"], ["vdpbf16ps", "vcvtneps2bf16"]),
        (SAPPHIRE_RAPIDS, [r"vdpbf16ps.*%zmm", "vcvtneps2bf16"], []),
        # Calls, in the form that is searched for.
        (ARM, [r"\n\tfmla\tv\d+\.4s", r"\n\tbl\t[A-Za-z_]\w+\n"], ["xmm"]),
    ],
    ids=lambda value: value.name if isinstance(value, Processor) else "",
)
def test_the_code_is_of_its_kind(
    told: Processor, present: list[str], absent: list[str], work: Work
) -> None:
    assert int(work.written[told].result()) >= len(COMPILED)
    for name in COMPILED:
        code = (work.folders[told] / f"{name}.s").read_text(encoding="utf-8")
        assert [pattern for pattern in present if not re.search(pattern, code)] == []
        assert [word for word in absent if word in code] == []
        if told is ARM:
            language = (work.folders[told] / f"{name}.ll").read_text(encoding="utf-8")
            assert 'target triple = "aarch64' in language and "llvm.x86" not in language


@pytest.mark.nightly
@pytest.mark.parametrize("told", TESTED, ids=lambda told: told.name)
def test_kernels_compute_the_same_as_on(told: Processor, work: Work) -> None:
    if not told.is_like_this_one:
        pytest.skip("its code does not run on this processor")
    said = work.tested[told].result()
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) > 100, said
    reasons = re.findall(r"^SKIPPED .*: (.*)$", said, re.MULTILINE)
    # Weights of 8, 4 and 12 bits need AVX-512.
    assert all("AVX-512" in reason for reason in reasons)
    assert bool(reasons) == (told is HASWELL)


@pytest.mark.parametrize(("ours", "torchs"), [(2.0, 1.0), (1.0, 2.0)])
def test_with_tiles_of_bfloat16_the_faster_products_are_taken(
    ours: float, torchs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {PackedWeight: ours, OneDnnMatrix: torchs}
    monkeypatch.setattr(kernels, "has_bfloat16_tiles", lambda: True)
    # One real measurement, with any result; torch's form needs at least AVX-512.
    runs_here = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    forms = times if runs_here else [PackedWeight]
    assert all(device._milliseconds(kind) > 0 for kind in forms)
    monkeypatch.setattr(device, "_milliseconds", times.__getitem__)
    for dtype, is_ours in (("bfloat16", ours < torchs), ("float32", True)):
        opened = open_cpu(dtype)
        form = PackedWeight if is_ours else OneDnnMatrix
        assert type(opened.matrix(torch.randn(32, 16), None)) is form
        assert opened.is_deterministic == is_ours
        weight, hidden = torch.randn(64, 64), torch.randn(3, 64).to(opened.dtype)
        gated = opened.gated_matrix(weight, None, Activation.SILU, has_bias=False)
        assert gated.kind == dtype
        gate, up = (hidden.float() @ weight.t()).chunk(2, dim=1)
        torch.testing.assert_close(gated(hidden).float(), F.silu(gate) * up, rtol=0.1, atol=0.2)
    options = DeviceOptions("bfloat16", "float32", deterministic=True)
    assert open_device("cpu", options).is_deterministic
