"""The RMS norm of a row, a vector at a time: written number by number, what the compiler made of it
took four cycles for each of them."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels.llvm import (
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    ZEROS,
    add_product,
    broadcast,
    call,
    constant,
    load,
    round_vector,
)
from text_generation_shard.device.cpu.kernels.tile import call_outlined

_LANE_NUMBERS = ir.Constant(INTS, list(range(LANES)))


@intrinsic(prefer_literal=True)
def normalize_row(
    typingctx: Any,
    kind: Any,
    is_added: Any,
    numbers: Any,
    added: Any,
    multiplier: Any,
    weight: Any,
    eps: Any,
    target: Any,
    size: Any,
) -> Any:
    """`add_norm` of one row by addresses; is_added: a literal, 0 if there is nothing to add."""
    if not isinstance(is_added, types.IntegerLiteral):
        return None
    whole, real = types.int64, types.float32
    signature = types.void(kind, is_added, whole, whole, real, whole, real, whole, whole)
    row = _Row(kind, bool(is_added.literal_value))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = f"normalize_row_{kind}_{is_added.literal_value}"
        call_outlined(builder, name, row.generate, *arguments[2:])
        return context.get_dummy_value()

    return signature, generate


class _Row:
    """Code for rows of one kind."""

    def __init__(self, kind: Any, is_added: bool) -> None:
        self._is_short, self._is_added = kind == types.uint16, is_added
        self._number = INT16 if self._is_short else FLOAT
        self._itemsize = 2 if self._is_short else 4

    def generate(
        self,
        builder: Any,
        numbers: Any,
        added: Any,
        multiplier: Any,
        weight: Any,
        eps: Any,
        target: Any,
        size: Any,
    ) -> None:
        """Squares are summed lane by lane, in the order of the numbers."""
        multipliers = broadcast(builder, multiplier)
        with builder.goto_entry_block():
            total = builder.alloca(FLOATS)
        builder.store(ZEROS, total)

        def sum_squares(offset: Any, mask: Any) -> None:
            value = self._load(builder, numbers, offset, mask)
            if self._is_added:
                more = self._load(builder, added, offset, mask)
                value = builder.fadd(value, builder.fmul(multipliers, more))
                value = self._store(builder, value, numbers, offset, mask)
            builder.store(add_product(builder, builder.load(total), value, value), total)

        _for_vectors(builder, size, sum_squares)
        mean = builder.fdiv(_sum(builder, builder.load(total)), builder.sitofp(size, FLOAT))
        root = call(builder, "llvm.sqrt.f32", FLOAT, builder.fadd(mean, eps))
        factors = broadcast(builder, builder.fdiv(FLOAT(1.0), root))

        def scale(offset: Any, mask: Any) -> None:
            value = builder.fmul(self._load(builder, numbers, offset, mask), factors)
            weights = _load_masked(builder, FLOAT, _at(builder, weight, offset, 4), mask)
            self._store(builder, builder.fmul(value, weights), target, offset, mask)

        _for_vectors(builder, size, scale)

    def _load(self, builder: Any, base: Any, offset: Any, mask: Any) -> Any:
        """As float32."""
        address = _at(builder, base, offset, self._itemsize)
        value = _load_masked(builder, self._number, address, mask)
        return self._widened(builder, value) if self._is_short else value

    def _store(self, builder: Any, value: Any, base: Any, offset: Any, mask: Any) -> Any:
        """Returns what was stored, as float32."""
        number = round_vector(builder, value) if self._is_short else value
        pointer = builder.inttoptr(
            _at(builder, base, offset, self._itemsize), number.type.as_pointer()
        )
        if mask is None:
            builder.store(number, pointer, align=self._itemsize)
        else:
            name = f"llvm.masked.store.{_suffix(self._number)}.p0"
            align = INT32(self._itemsize)
            call(builder, name, ir.VoidType(), number, pointer, align, mask)
        return self._widened(builder, number) if self._is_short else value

    def _widened(self, builder: Any, numbers: Any) -> Any:
        # A bfloat16 is the upper half of a float32.
        wide = builder.shl(builder.zext(numbers, INTS), constant(16))
        return builder.bitcast(wide, FLOATS)


def _for_vectors(builder: Any, size: Any, generate: Callable[[Any, Any], None]) -> None:
    """generate(offset, mask) for every 16 of so many numbers; the mask is None if all count."""
    with cgutils.for_range(builder, builder.lshr(size, INT64(4))) as loop:
        generate(builder.mul(loop.index, INT64(LANES)), None)
    rest = builder.and_(size, INT64(LANES - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, INT64(0))):
        count = broadcast(builder, builder.trunc(rest, INT32))
        mask = builder.icmp_signed("<", _LANE_NUMBERS, count)
        generate(builder.sub(size, rest), mask)


def _at(builder: Any, base: Any, offset: Any, itemsize: int) -> Any:
    return builder.add(base, builder.mul(offset, INT64(itemsize)))


def _load_masked(builder: Any, number: Any, address: Any, mask: Any) -> Any:
    """16 numbers; 0 where the mask is not set."""
    vector = ir.VectorType(number, LANES)
    if mask is None:
        return load(builder, address, vector, 2 if number == INT16 else 4)
    pointer = builder.inttoptr(address, vector.as_pointer())
    align, others = INT32(2 if number == INT16 else 4), ir.Constant(vector, None)
    name = f"llvm.masked.load.{_suffix(number)}.p0"
    return call(builder, name, vector, pointer, align, mask, others)


def _suffix(number: Any) -> str:
    return f"v{LANES}i16" if number == INT16 else f"v{LANES}f32"


def _sum(builder: Any, value: Any) -> Any:
    for distance in (8, 4, 2, 1):
        order = ir.Constant(INTS, [(lane + distance) % LANES for lane in range(LANES)])
        value = builder.fadd(value, builder.shuffle_vector(value, value, order))
    return builder.extract_element(value, INT32(0))
