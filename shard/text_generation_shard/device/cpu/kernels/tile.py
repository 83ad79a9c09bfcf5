"""Matrix products of packed vectors with a few rows, in registers.

The one loop behind linears and attention. What is multiplied lies in vectors of 16 lanes; a step
takes one vector of a column and, of each row, the 4 bytes that are multiplied with all of its
lanes: two bfloat16 or one float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from text_generation_shard.device.cpu.kernels import bfloat12, processor
from text_generation_shard.device.cpu.kernels.llvm import (
    BFLOATS,
    FLOAT,
    FLOATS,
    INT8,
    INT32,
    INT64,
    INTS,
    VECTOR_BYTES,
    ZEROS,
    add_product,
    broadcast,
    call,
    constant,
    fetch_line,
    load,
)
from text_generation_shard.device.cpu.kernels.vector import STEP_BYTES

BYTES = ir.VectorType(INT8, VECTOR_BYTES)


def _magnitudes() -> list[list[Any]]:
    """Tables of the lower and the upper bytes of the bfloat16 of 0 to 127, two vectors each."""
    bits = np.arange(128, dtype=np.float32).view(np.uint32) >> 16
    tables = (np.split(part & 255, 2) for part in (bits, bits >> 8))
    return [[ir.Constant(BYTES, half.tolist()) for half in halves] for halves in tables]


_MAGNITUDES: Final = _magnitudes()


@dataclass(frozen=True, slots=True)
class Form:
    """How the vectors of some steps lie in memory, and how those of one are multiplied."""

    # Bytes of one step, and how many steps `load` takes from an address, which is one vector of
    # each; the number of steps of a column is a multiple of it.
    step_bytes: int
    steps: int
    load: Callable[[Any, Any], list[Any]]
    multiply: Callable[[Any, Any, Any, Any], Any]
    # Tiles of up to so many rows have what the tile behind them will read fetched meanwhile. Worth
    # it where the processor does not do so by itself: for several columns at once, each too short a
    # stream; and where between two vectors there is so much to do that it does not see a stream.
    fetching_rows: int = 0


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
    return _tile_of(kind, rows, columns, _call)


@intrinsic(prefer_literal=True)
def outlined_tile(
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
    """`tile` as a function of its own: where there is one of many to be chosen."""
    return _tile_of(kind, rows, columns, call_outlined)


def _tile_of(kind: Any, rows: Any, columns: Any, call: Callable[..., None]) -> Any:
    """What an intrinsic returns; call: how its code is reached."""
    literal = types.IntegerLiteral
    if not (isinstance(rows, literal) and isinstance(columns, literal)):
        return None
    form, size = FORMS[kind], (rows.literal_value, columns.literal_value)
    starts_type = types.UniTuple(types.int64, size[1])
    signature = types.void(kind, rows, columns, starts_type, *(types.int64,) * 5)

    def generate_tile(builder: Any, *arguments: Any) -> None:
        starts = list(arguments[: size[1]])
        inputs, input_stride, steps, sums, sums_stride = arguments[size[1] :]
        addresses = grid_addresses(builder, sums, sums_stride, size)
        initial = [ZEROS] * len(addresses)
        used = form
        if size[0] <= form.fetching_rows:
            # Columns lie one behind the other, and so do tiles.
            ahead = builder.mul(steps, INT64(form.step_bytes * size[1]))
            used = replace(form, load=_fetching(form, ahead))
        totals = accumulate(builder, size, starts, inputs, input_stride, steps, initial, used)
        for total, address in zip(totals, addresses, strict=True):
            builder.store(total, address, align=4)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = cgutils.unpack_tuple(builder, arguments[3], size[1])
        name = f"tile_{kind}_{size[0]}_{size[1]}"
        call(builder, name, generate_tile, *starts, *arguments[4:])
        return context.get_dummy_value()

    return signature, generate


def _call(builder: Any, name: str, generate: Callable[..., None], *arguments: Any) -> None:
    generate(builder, *arguments)


def call_outlined(builder: Any, name: str, generate: Callable[..., None], *arguments: Any) -> None:
    """What `generate(builder, *arguments)` writes, as a function of its own that is called here.

    Compiled into what is around it, a loop has hundreds of addresses computed in front of it: the
    compiler moves what does not change out of all loops, for each of the tiles that might be used.
    """
    function = builder.module.globals.get(name)
    if function is None:
        function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = ir.Function(builder.module, function_type, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        generate(inside, *function.args)
        inside.ret_void()
    builder.call(function, arguments)


@intrinsic
def dequantize(typingctx: Any, kind: Any, vectors: Any, steps: Any, target: Any) -> Any:
    """Packed vectors of this kind, so many steps of one column, as those of the rows they are
    multiplied with: bfloat16 for INT8. A step takes a whole vector then."""
    form = FORMS[kind]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors, steps, target = arguments[1:]
        count = builder.sdiv(steps, INT64(form.steps))
        with cgutils.for_range(builder, count) as loop:
            step = builder.mul(loop.index, INT64(form.steps))
            at = builder.add(vectors, builder.mul(step, INT64(form.step_bytes)))
            to = builder.add(target, builder.mul(step, INT64(VECTOR_BYTES)))
            for place, vector in enumerate(form.load(builder, at)):
                address = builder.add(to, INT64(place * VECTOR_BYTES))
                builder.store(vector, builder.inttoptr(address, INTS.as_pointer()), align=64)
        return context.get_dummy_value()

    return types.void(kind, *(types.int64,) * 3), generate


def _fetching(form: Form, ahead: Any) -> Callable[[Any, Any], Any]:
    """A form's `load` that also has what lies so many bytes further on brought into the cache;
    beyond the end of the memory that does nothing."""

    def load_and_fetch(builder: Any, address: Any) -> Any:
        for offset in range(0, form.steps * form.step_bytes, VECTOR_BYTES):
            fetch_line(builder, builder.add(builder.add(address, ahead), INT64(offset)))
        return form.load(builder, address)

    return load_and_fetch


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
    rows = [
        builder.add(
            builder.add(inputs, builder.mul(input_stride, INT64(row))),
            builder.mul(step, INT64(STEP_BYTES)),
        )
        for row in range(size[0])
    ]
    next_sums = list(sums)
    for part in range(form.steps):
        for row, start in enumerate(rows):
            address = builder.add(start, INT64(part * STEP_BYTES))
            value = broadcast(builder, load(builder, address, INT32, 4))
            for place, vectors in enumerate(columns, row * size[1]):
                next_sums[place] = form.multiply(builder, next_sums[place], vectors[part], value)
    next_step = builder.add(step, INT64(form.steps))
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
    if processor.has_bfloat16_products():
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


def _load_vector(builder: Any, address: Any) -> list[Any]:
    return [load(builder, address, INTS, VECTOR_BYTES)]


def _load_bytes(builder: Any, address: Any) -> list[Any]:
    """64 whole numbers of a byte, as `linear.pack` lays them out, in two vectors of pairs of
    bfloat16, which hold them exactly."""
    numbers = load(builder, address, BYTES, VECTOR_BYTES)
    lower, upper = (_look_up if processor.has_byte_tables() else _convert)(builder, numbers)
    # The lower and the upper bytes of the first 8 of every 16 numbers, then of the others.
    halves = []
    for first in (0, 8):
        places = [
            side * VECTOR_BYTES + quarter + number
            for quarter in range(0, VECTOR_BYTES, 16)
            for number in range(first, first + 8)
            for side in (0, 1)
        ]
        order = ir.Constant(ir.VectorType(INT32, VECTOR_BYTES), places)
        halves.append(builder.bitcast(builder.shuffle_vector(lower, upper, order), INTS))
    return halves


def _look_up(builder: Any, numbers: Any) -> tuple[Any, Any]:
    """The lower and the upper bytes of the bfloat16 that signed magnitudes stand for."""
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    lower, upper = (
        # Of an index the lower 7 bits count.
        call(builder, name, BYTES, table[0], numbers, table[1])
        for table in _MAGNITUDES
    )
    signs = builder.and_(numbers, ir.Constant(BYTES, [-128] * VECTOR_BYTES))
    return lower, builder.or_(upper, signs)


def _convert(builder: Any, numbers: Any) -> tuple[Any, Any]:
    """`_look_up` where AVX512_VBMI is missing."""
    magnitudes = builder.and_(numbers, ir.Constant(BYTES, [127] * VECTOR_BYTES))
    signs = builder.and_(numbers, ir.Constant(BYTES, [-128] * VECTOR_BYTES))
    floats = builder.uitofp(magnitudes, ir.VectorType(FLOAT, VECTOR_BYTES))
    bits = builder.bitcast(floats, ir.VectorType(INT32, VECTOR_BYTES))
    # A bfloat16 is the upper half of a float32.
    lower, upper = (
        builder.trunc(builder.lshr(bits, ir.Constant(bits.type, [shift] * VECTOR_BYTES)), BYTES)
        for shift in (16, 24)
    )
    return lower, builder.or_(upper, signs)


FORMS: Final = {
    types.uint16: Form(VECTOR_BYTES, 1, _load_vector, add_pairs),
    types.float32: Form(VECTOR_BYTES, 1, _load_vector, _add_floats),
    types.int8: Form(VECTOR_BYTES // 2, 2, _load_bytes, add_pairs, fetching_rows=2),
    types.int16: Form(
        bfloat12.STEP_BYTES, bfloat12.STEPS, bfloat12.load_steps, add_pairs, fetching_rows=16
    ),
}


@intrinsic
def bytes_per_step(typingctx: Any, kind: Any) -> Any:
    """Bytes of one step of 16 weights of this kind."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return INT64(FORMS[kind].step_bytes)

    return types.int64(kind), generate
