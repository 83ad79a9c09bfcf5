"""What Triton does before it first runs a kernel, without a GPU: run in the image for CUDA, where
`triton` can be imported.

It compiles its part that talks to the driver with gcc and Python.h, and loads it; and one of our
kernels for Hopper. Both stay in TRITON_CACHE_DIR, and what numba compiles in NUMBA_CACHE_DIR, or
where these can not be written, in /tmp.
"""

import ctypes
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numba
import triton
from text_generation_shard.device.cpu.kernels.cache import choose_directory
from text_generation_shard.device.cuda import device
from text_generation_shard.device.cuda.kernels import layers
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

LIBRARY = "libcuda.so.1"


def main() -> None:
    """Compile all three, where the server would keep them."""
    device.choose_directory()
    with tempfile.TemporaryDirectory() as libraries:
        bring_driver(Path(libraries))
        driver.CudaUtils()
    compile_kernel()
    choose_directory()
    numba.njit(cache=True)(add)(1, 2)


def add(left: int, right: int) -> int:
    """For numba."""
    return left + right


def bring_driver(folder: Path) -> None:
    """The container toolkit brings the driver's library. Here its functions are empty, since none
    is called."""
    source = Path(driver.__file__).with_name("driver.c").read_text(encoding="utf-8")
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+", source)))
    (folder / "driver.c").write_text("\n".join(f"void {name}(void) {{}}" for name in functions))
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "driver.c", "-o", LIBRARY]
    subprocess.run(command, cwd=folder, check=True)
    ctypes.CDLL(str(folder / LIBRARY), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)


def compile_kernel() -> None:
    """As the first launch would."""
    names = ("both_ptr", "out_ptr", "SIZE", "TILE", "ACTIVATION")
    signature = dict.fromkeys(names, "constexpr") | dict.fromkeys(names[:2], "*bf16")
    constants = {(2,): 4096, (3,): 1024, (4,): "silu"}
    source = ASTSource(layers.gate, signature, constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    main()
