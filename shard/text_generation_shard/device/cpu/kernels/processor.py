"""What the processor can do that the kernels are compiled for; only this file asks.

That is whatever numba compiles for: this machine's, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
tell of another. All answers come from what numba's cache of compiled code goes by, so that code for
one processor is never read where it is told of another.
"""

from functools import cache


@cache
def target() -> tuple[str, str, str]:
    """Triple, name and features, as LLVM writes them."""
    # Late: it takes a third of a second if nobody else has imported it.
    from numba.core.registry import cpu_target

    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, name, features


def is_x86() -> bool:
    """Whether it is one of Intel's or AMD's, of 64 bits."""
    return target()[0].startswith("x86_64")


def is_arm() -> bool:
    """Whether it is one of ARM's, of 64 bits; macOS has a name of its own for them."""
    return target()[0].startswith(("aarch64", "arm64"))


def are_vectors_wide() -> bool:
    """Whether it has AVX-512; weights of 8, 4 and 12 bits are multiplied only there."""
    return is_x86() and features() >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def has_bfloat16_products() -> bool:
    """Whether it rounds to bfloat16 and multiplies pairs of them (AVX512_BF16)."""
    return are_vectors_wide() and "avx512bf16" in features()


def has_byte_tables() -> bool:
    """Whether it looks up bytes in tables of 128 (AVX512_VBMI)."""
    return are_vectors_wide() and "avx512vbmi" in features()


def has_bfloat16_tiles() -> bool:
    """Whether it multiplies whole tiles of bfloat16 (AMX), which torch's products do."""
    return features() >= {"amx-tile", "amx-bf16"}


@cache
def features() -> frozenset[str]:
    """The features it has: of each name the last mention counts, with a plus or a minus."""
    mentions = [feature for feature in target()[2].split(",") if feature]
    has = {feature[1:]: feature.startswith("+") for feature in mentions}
    return frozenset(name for name, is_there in has.items() if is_there)
