"""Matrix products of packed vectors with a few rows, in registers.

The one loop behind linears and attention. What is multiplied lies in vectors of 16 lanes; a step
takes one vector of a column and, of each row, the 4 bytes that are multiplied with all of its
lanes: two bfloat16 or one float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from text_generation_shard.kernels.llvm import (
    BFLOATS,
    FLOATS,
    INT8,
    INT32,
    INT64,
    INTS,
    LANES,
    SHORTS,
    VECTOR_BYTES,
    ZEROS,
    add_product,
    broadcast,
    call,
    constant,
    load,
)
from text_generation_shard.kernels.vector import STEP_BYTES

# Whether this processor multiplies pairs of bfloat16 (AVX512_BF16).
_HAS_BFLOAT16_PRODUCTS = bool(binding.get_host_cpu_features().get("avx512bf16"))


@dataclass(frozen=True, slots=True)
class Form:
    """How the vectors of one step lie in memory, and how they are multiplied."""

    step_bytes: int
    load: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any, Any, Any], Any]


@intrinsic(prefer_literal=True)
def tile(
    typingctx: Any,
    kind: Any,
    rows: Any,
    columns: Any,
    vectors: Any,
    inputs: Any,
    input_stride: Any,
    steps: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    """sums[rows, columns * 16] = inputs[rows, steps] times packed vectors.

    kind: marker of the vectors; inputs are of the same kind, or bfloat16 for INT8. rows and
    columns: literals, the size of the tile; their product is how many sums are kept in registers.
    vectors: a tuple of `columns` addresses, each of `steps` vectors in turn. inputs and sums:
    addresses; strides in bytes. Sums are float32. Each adds its products in the order of the steps,
    whatever the size of the tile: a result never depends on what is computed beside it.
    """
    literal = types.IntegerLiteral
    if not (isinstance(rows, literal) and isinstance(columns, literal)):
        return None
    num_rows, num_columns = rows.literal_value, columns.literal_value
    starts_type = types.UniTuple(types.int64, num_columns)
    signature = types.void(kind, rows, columns, starts_type, *(types.int64,) * 5)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors, inputs, input_stride, steps, sums, sums_stride = arguments[3:]
        starts = cgutils.unpack_tuple(builder, vectors, num_columns)
        size = (num_rows, num_columns)
        addresses = grid_addresses(builder, sums, sums_stride, size)
        initial = [ZEROS] * (num_rows * num_columns)
        form = FORMS[kind]
        totals = accumulate(builder, size, starts, inputs, input_stride, steps, initial, form)
        for total, address in zip(totals, addresses, strict=True):
            builder.store(total, address, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def paged_tile(
    typingctx: Any,
    kind: Any,
    rows: Any,
    columns: Any,
    pages: Any,
    num_pages: Any,
    offset: Any,
    column_bytes: Any,
    inputs: Any,
    input_stride: Any,
    steps: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    """sums[rows, columns * 16] += inputs[rows, num_pages * steps] times vectors that lie in pages.

    pages: the address of `num_pages` addresses; each page holds `steps` vectors of the first column
    at `offset`, those of the next `column_bytes` behind. The rest is as in `tile`.
    """
    literal = types.IntegerLiteral
    if not (isinstance(rows, literal) and isinstance(columns, literal)):
        return None
    size = rows.literal_value, columns.literal_value
    form = FORMS[kind]
    signature = types.void(kind, rows, columns, *(types.int64,) * 9)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pages, num_pages, offset, column_bytes, inputs, input_stride, steps = arguments[3:10]
        addresses = grid_addresses(builder, arguments[10], arguments[11], size)
        before = builder.block
        body, end = (builder.append_basic_block(name) for name in ("page", "pages_end"))
        initial = [builder.load(address, align=4) for address in addresses]
        builder.branch(body)
        builder.position_at_end(body)
        page = builder.phi(INT64)
        page.add_incoming(INT64(0), before)
        sums = [builder.phi(FLOATS) for _ in initial]
        for phi, value in zip(sums, initial, strict=True):
            phi.add_incoming(value, before)
        address = builder.add(pages, builder.mul(page, INT64(8)))
        start = builder.add(load(builder, address, INT64, 8), offset)
        starts = [
            builder.add(start, builder.mul(column_bytes, INT64(column)))
            for column in range(size[1])
        ]
        first = builder.add(inputs, builder.mul(page, builder.mul(steps, INT64(STEP_BYTES))))
        totals = accumulate(builder, size, starts, first, input_stride, steps, sums, form)
        next_page = builder.add(page, INT64(1))
        page.add_incoming(next_page, builder.block)
        for phi, value in zip(sums, totals, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", next_page, num_pages), body, end)
        builder.position_at_end(end)
        for total, address in zip(totals, addresses, strict=True):
            builder.store(total, address, align=4)
        return context.get_dummy_value()

    return signature, generate


def grid_addresses(builder: Any, base: Any, stride: Any, size: tuple[int, int]) -> list[Any]:
    """Where the vectors of a tile lie in rows of `stride` bytes."""
    addresses = []
    for row in range(size[0]):
        start = builder.add(base, builder.mul(stride, INT64(row)))
        for column in range(size[1]):
            address = builder.add(start, INT64(column * VECTOR_BYTES))
            addresses.append(builder.inttoptr(address, FLOATS.as_pointer()))
    return addresses


def accumulate(
    builder: Any,
    size: tuple[int, int],
    starts: list[Any],
    inputs: Any,
    input_stride: Any,
    steps: Any,
    initial: list[Any],
    form: Form,
) -> list[Any]:
    """The loop over the steps; every sum stays in a register."""
    before = builder.block
    body, end = (builder.append_basic_block(name) for name in ("step", "end"))
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(INT64)
    step.add_incoming(INT64(0), before)
    sums = [builder.phi(FLOATS) for _ in initial]
    for phi, value in zip(sums, initial, strict=True):
        phi.add_incoming(value, before)
    offset = builder.mul(step, INT64(form.step_bytes))
    columns = [form.load(builder, builder.add(start, offset)) for start in starts]
    offset = builder.mul(step, INT64(STEP_BYTES))
    next_sums = []
    for row in range(size[0]):
        address = builder.add(builder.add(inputs, builder.mul(input_stride, INT64(row))), offset)
        value = broadcast(builder, load(builder, address, INT32, 4))
        for column in range(size[1]):
            total = sums[row * size[1] + column]
            next_sums.append(form.multiply(builder, total, columns[column], value))
    next_step = builder.add(step, INT64(1))
    step.add_incoming(next_step, body)
    for phi, value in zip(sums, next_sums, strict=True):
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", next_step, steps), body, end)
    builder.position_at_end(end)
    return next_sums


def _add_floats(builder: Any, total: Any, column: Any, value: Any) -> Any:
    column, value = builder.bitcast(column, FLOATS), builder.bitcast(value, FLOATS)
    return add_product(builder, total, column, value)


def add_pairs(builder: Any, total: Any, column: Any, value: Any) -> Any:
    """total + the products of pairs of bfloat16, lane by lane."""
    if _HAS_BFLOAT16_PRODUCTS:
        column, value = builder.bitcast(column, BFLOATS), builder.bitcast(value, BFLOATS)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(builder, name, FLOATS, total, column, value)
    # A bfloat16 is the upper half of a float32.
    upper, shift = constant(-(2**16)), constant(16)
    for halves in (
        (builder.shl(column, shift), builder.shl(value, shift)),
        (builder.and_(column, upper), builder.and_(value, upper)),
    ):
        total = _add_floats(builder, total, *halves)
    return total


def _load_vector(builder: Any, address: Any) -> Any:
    return load(builder, address, INTS, VECTOR_BYTES)


def _load_bytes(builder: Any, address: Any) -> Any:
    """32 whole numbers of a byte as pairs of bfloat16, which hold them exactly."""
    halves = []
    for place in (0, 1):
        start = builder.add(address, INT64(place * LANES))
        numbers = load(builder, start, ir.VectorType(INT8, LANES), LANES)
        halves.append(builder.sitofp(builder.sext(numbers, INTS), FLOATS))
    # The upper half of a float32 is a bfloat16, and of these nothing is in the lower.
    bits = [builder.bitcast(half, SHORTS) for half in halves]
    upper = ir.Constant(
        ir.VectorType(INT32, 2 * LANES), [2 * place + 1 for place in range(2 * LANES)]
    )
    return builder.bitcast(builder.shuffle_vector(*bits, upper), INTS)


FORMS: Final = {
    types.uint16: Form(VECTOR_BYTES, _load_vector, add_pairs),
    types.float32: Form(VECTOR_BYTES, _load_vector, _add_floats),
    types.int8: Form(VECTOR_BYTES // 2, _load_bytes, add_pairs),
}


@intrinsic
def bytes_per_step(typingctx: Any, kind: Any) -> Any:
    """Bytes of one step of 16 weights of this kind."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return INT64(FORMS[kind].step_bytes)

    return types.int64(kind), generate
