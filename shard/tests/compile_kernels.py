"""Compiles every kernel of the CUDA device as its launches would, without a GPU. A separate
process, because the interpreter and the compiler exclude each other.

Prints a JSON list: kernel, architecture, heads, dtype of its first argument, and the resources
reported by ptxas; for the heads of Llama 3 8 B and one --kv-cache-dtype, or for all SHAPES and
dtypes with `--all`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from text_generation_process.sampling import Sampling
from text_generation_shard.arrays import plain_upload
from text_generation_shard.device.base import Activation, Angles, CacheShape, DeviceOptions
from text_generation_shard.device.cuda import attention, matrices, operators, sampler
from text_generation_shard.device.cuda.attention import HeadShape
from text_generation_shard.device.cuda.device import FIRST_WITH_CACHE, FIRST_WITH_FLOAT8
from text_generation_shard.device.cuda.operators import TritonDevice
from text_generation_shard.device.cuda.sampler import begin
from text_generation_shard.sampling import SamplingTable, TokenHistory, Watermark
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.knobs import nvidia

from shard.tests.device.test_attention import make_batch, to_device

CAPABILITIES = (80, 89, 90, 100)
# Heads, KV heads, features of a head, hidden size.
SHAPES = ((32, 8, 128, 4096), (32, 8, 64, 2048), (8, 1, 256, 2048), (14, 2, 80, 1120))
# Weights: None is float, by one tile.
FORMS = (None, "int8", "int4")
OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Compiler:
    """Replaces `launch`: compiles the kernel instead of launching it."""

    def __init__(self) -> None:
        self.capability = 0
        self.shape: tuple[int, ...] = ()
        # Suffix of names of kernels with a cache: fp8, deterministic, or empty.
        self.variant = ""
        self.found: list[dict[str, Any]] = []
        self._seen: set[str] = set()

    def __call__(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        signature, constants, attributes = {}, {}, {}
        # Arguments for which Triton compiles specialized code.
        special: list[str] = []
        for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if not kernel.params[index].do_not_specialize_on_alignment:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            elif value is None:
                signature[name], constants[(index,)] = "constexpr", None
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and not kernel.params[index].do_not_specialize:
                    special.append(name)
                    if value % 16 == 0:
                        attributes[(index,)] = [["tt.divisibility", 16]]
        chosen = {name: options.pop(name) for name in OPTIONS if name in options}
        for name, value in options.items():
            signature[name] = "constexpr"
            constants[(kernel.arg_names.index(name),)] = value
        key = repr((kernel.__name__, self.capability, signature, constants))
        if key in self._seen:
            return
        self._seen.add(key)
        source = ASTSource(kernel, signature, constants, attributes)
        target = GPUTarget("cuda", self.capability, 32)
        compiled = triton.compile(source, target=target, options=chosen)
        variant = self.variant if "keys_ptr" in kernel.arg_names else ""
        name = f"{kernel.__name__} {variant}".rstrip()
        row = {"kernel": name, "sm": self.capability, "heads": self.shape}
        row |= {"special": special, "first": signature[kernel.arg_names[0]]}
        self.found.append(row | taken(compiled, self.capability))


def taken(compiled: Any, capability: int) -> dict[str, int]:
    """Registers, spilled bytes, shared memory; products on tensor cores, loads of 16 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        architecture = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
        ptxas = nvidia.ptxas_blackwell if capability >= 100 else nvidia.ptxas
        said = run(ptxas.path, "-v", architecture, str(ptx), "-o", str(cubin) + ".2")
        code = run(nvidia.cuobjdump.path, "--dump-sass", str(cubin))
    return {
        "registers": number(r"Used (\d+) registers", said),
        "spilled": number(r"(\d+) bytes spill stores", said),
        "shared": compiled.metadata.shared,
        "products": len(re.findall(r"\b(?:HG?|UTCH)MMA\b", code)),
        "wide_loads": len(re.findall(r"LDG(?:STS)?[.\w]*\.128", code)),
    }


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in {text[-500:]}"
    return int(found[1])


def exercise(compiler: Compiler) -> None:
    """All kernels of a model with such heads."""
    hidden_size = compiler.shape[3]
    kind, meta = torch.bfloat16, torch.device("meta")
    device = TritonDevice(meta, kind, DeviceOptions("bfloat16", "bfloat16"))
    device.capability = compiler.capability
    hidden = torch.empty(4, hidden_size, dtype=kind, device=meta)
    device.add_norm(hidden, hidden, 1.0, hidden[0].float(), 1e-5)
    weight = torch.empty(2 * hidden_size, hidden_size, dtype=kind, device=meta)
    device.gated_matrix(weight, None, Activation.SILU, False)(hidden)
    compiler.variant = ""
    attend(compiler, kind, (None, 512))
    compiler.variant = "deterministic"
    attend(compiler, kind, (None,), is_deterministic=True)


def attend(
    compiler: Compiler, kept: torch.dtype, windows: Sequence[int | None], **options: bool
) -> None:
    """Attention kernels for such heads and this cache dtype."""
    num_heads, num_kv_heads, head_dim, _ = compiler.shape
    kind, meta = torch.bfloat16, torch.device("meta")
    heads_of = HeadShape(num_heads, num_kv_heads, head_dim, 0.1)
    angles = torch.empty(4096, 2, head_dim // 2, device=meta)
    for lengths, takes_flash in (([1, 1], False), ([300, 20], False), ([300, 20], True)):
        own = attention.TritonAttention(
            heads_of, meta, compiler.capability, takes_flash=takes_flash, **options
        )
        own.allocate(CacheShape(1, num_kv_heads, head_dim, 16, kept), 4096)
        batch = to_device(make_batch([1000, 2000], lengths, lengths == [1, 1]), "meta")
        width = num_heads + 2 * num_kv_heads
        heads = torch.empty(sum(lengths), width, head_dim, dtype=kind, device=meta)
        plan = own.plan(batch, Angles(angles, batch.positions))
        for window in windows:
            own.forward(heads, 0, window, True, plan)


def multiply(
    compiler: Compiler,
    kind: torch.dtype,
    rows: Sequence[int],
    forms: Sequence[str | None] = FORMS,
) -> None:
    """Products of this hidden size, by the tiles for each number of rows."""
    size, meta = compiler.shape[3], torch.device("meta")
    weight = torch.empty(size, size, dtype=kind, device=meta)
    for quantize in forms:
        options = DeviceOptions(None, "bfloat16", quantize, deterministic=quantize is None)
        matrix = operators.TritonDevice(meta, kind, options).matrix(weight, quantize)
        for count in rows:
            matrix(torch.empty(count, size, dtype=kind, device=meta))
    if compiler.capability >= FIRST_WITH_FLOAT8 and kind == torch.bfloat16:
        matrices.quantized_float8(weight)


def choose() -> None:
    """All kernels of the choice of tokens, with a vocabulary of Llama 3's size."""
    scores = torch.empty(2, 128256, device="meta")
    table, rows = SamplingTable(2), np.arange(2)
    drawn = Sampling(top_p=0.9, repetition_penalty=1.2, logit_bias=((3, 1.0),))
    table.set(0, drawn)
    tokens = np.zeros((2, 100), np.int32)
    history = TokenHistory(tokens, rows, rows + 50, rows + 20, rows + 100)
    allowed = SimpleNamespace(
        places=rows, masks=lambda: torch.empty(2, 128256 // 32, dtype=torch.int32)
    )
    begin(plain_upload(scores.device), scores, table, history, rows, Watermark(0.5, 2.0), allowed)


def main() -> None:
    """Compile."""
    is_all = "--all" in sys.argv
    asked = [int(word) for word in sys.argv[1:] if word.isdigit()]
    shapes = SHAPES if is_all else SHAPES[:1]
    compiler = Compiler()
    for module in (attention, matrices, operators, sampler):
        module.launch = compiler
    for compiler.capability in asked or CAPABILITIES:
        for compiler.shape in shapes:
            exercise(compiler)
            offered = [
                name for name, first in FIRST_WITH_CACHE.items() if compiler.capability >= first
            ]
            compiler.variant = "fp8"
            for name in offered if "--all" in sys.argv else offered[:1]:
                attend(compiler, TritonDevice.cache_dtypes[name], (None,))
        compiler.shape = SHAPES[0]
        multiply(compiler, torch.bfloat16, (16, 256, 4096) if is_all else (16, 4096))
        if is_all:
            multiply(compiler, torch.float16, (16, 256, 4096))
        # Tensor cores would multiply values that were int8, and drop bits.
        if is_all or compiler.capability >= 100:
            multiply(compiler, torch.float32, (16,), FORMS if is_all else ("int8",))
        choose()
    json.dump(compiler.found, sys.stdout)


if __name__ == "__main__":
    main()
