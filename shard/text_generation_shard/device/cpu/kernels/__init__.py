"""CPU kernels, compiled by numba from Python: their target processor, and the structs of their
arguments.

`compile.prepare` must be called first. Only this file queries the features of the target. It is
this machine's processor, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another one. All
features come from the target that is also the key of numba's cache, so that code for one processor
is never loaded on another.
"""

import functools
from typing import Annotated, Any, get_type_hints

import numpy as np
from numba import boolean, float32, int32, int64, types
from numba.core.registry import cpu_target

Address = Annotated[int, int64]
"""Address of the first byte, as int64; 0 for a missing field."""
Count = Annotated[int, int64]
Flag = Annotated[bool, boolean]
Real = Annotated[np.float32, float32]
Ints = Annotated[Any, int64[::1]]
"""A contiguous array, like those below."""
IntRows = Annotated[Any, int64[:, ::1]]
ShortRows = Annotated[Any, int32[:, ::1]]
Reals = Annotated[Any, float32[::1]]
RealRows = Annotated[Any, float32[:, ::1]]


def struct_type(struct: type, **others: Any) -> Any:
    """The numba type of a NamedTuple; others: types of fields without one in their annotation."""
    hints = get_type_hints(struct, include_extras=True)
    fields = [others.get(name) or hint.__metadata__[0] for name, hint in hints.items()]
    return types.BaseTuple.from_types(fields, struct)


MAX_HEAD_DIM = 256
"""Most features of a head in `attention`."""


@functools.cache
def target() -> tuple[str, str, str]:
    """Triple, name and features, as LLVM writes them."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, name, features


def is_x86() -> bool:
    """Whether it is x86-64."""
    return target()[0].startswith("x86_64")


def is_arm() -> bool:
    """Whether it is 64-bit ARM, which macOS calls arm64."""
    return target()[0].startswith(("aarch64", "arm64"))


def are_vectors_wide() -> bool:
    """Whether it has AVX-512, which products with weights of 8, 4 and 12 bits need."""
    return is_x86() and features() >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def has_bfloat16_products() -> bool:
    """Whether it converts to bfloat16 and multiplies pairs of bfloat16 (AVX512_BF16)."""
    return are_vectors_wide() and "avx512bf16" in features()


def has_byte_tables() -> bool:
    """Whether it permutes bytes with tables of 128 (AVX512_VBMI)."""
    return are_vectors_wide() and "avx512vbmi" in features()


def has_bfloat16_tiles() -> bool:
    """Whether it has matrix tiles of bfloat16 (AMX), which torch's products use."""
    return features() >= {"amx-tile", "amx-bf16"}


@functools.cache
def features() -> frozenset[str]:
    """The features it has. The last mention of a name, with a plus or a minus, counts."""
    mentions = [feature for feature in target()[2].split(",") if feature]
    has = {feature[1:]: feature.startswith("+") for feature in mentions}
    return frozenset(name for name, is_there in has.items() if is_there)
