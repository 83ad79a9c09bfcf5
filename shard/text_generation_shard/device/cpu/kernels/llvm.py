"""The words of LLVM's language that the kernels are written in where numba's do not reach."""

from typing import Any, Final

from llvmlite import ir

from text_generation_shard.device.cpu.kernels import processor

LANES: Final = 16
"""Outputs, tokens or features that lie side by side in a vector."""
VECTOR_BYTES: Final = 64

INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)
SHORTS = ir.VectorType(INT16, 2 * LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def constant(number: int) -> Any:
    """A vector of 16 times the same whole number."""
    return ir.Constant(INTS, [number] * LANES)


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """What lies at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def broadcast(builder: Any, value: Any) -> Any:
    """A vector of 16 times the same value."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(first, first, constant(0))


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """One of LLVM's own functions."""
    function = builder.module.globals.get(name)
    if function is None:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, function_type, name)
    return builder.call(function, arguments)


def fetch_line(builder: Any, address: Any) -> None:
    """Have what lies at an address brought into the second-level cache; beyond the end of the
    memory that does nothing."""
    pointer = builder.inttoptr(address, INT8.as_pointer())
    is_read, locality, is_data = INT32(0), INT32(2), INT32(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, is_read, locality, is_data)


def add_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right for vectors of float32, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, left, right, total)


def round_vector(builder: Any, value: Any) -> Any:
    """16 float32, none of them NaN, as the bits of bfloat16 (to nearest, ties to even)."""
    short = ir.VectorType(INT16, LANES)
    if processor.has_bfloat16_products():
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.bitcast(call(builder, name, ir.VectorType(_BFloat(), LANES), value), short)
    bits = builder.bitcast(value, INTS)
    last = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    bits = builder.add(bits, builder.add(last, constant(0x7FFF)))
    return builder.trunc(builder.lshr(bits, constant(16)), short)
