"""What the kernels are composed of where numba's own words do not reach. Here and in `vector_code`,
nowhere else but in `clock`, LLVM's language is written.

Vectors are values of compiled code: they may be held in variables and tuples, and go through
functions. `+ - * /`, `<< >> & |` and comparisons are lane by lane; `>>` fills with zeros, and a
number on the right stands for a vector of it. Nothing is reordered or fused. A comparison gives a
mask, a vector of booleans. Addresses are int64. What threads tell each other by are words of
memory, int64, that are read and written whole, in order.

A function here writes the code of one intrinsic: it gets the builder, the types, and the values.
"""

import operator
from collections.abc import Callable
from functools import cache, partial
from inspect import Signature, signature
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    register_model,
    type_callable,
    typeof_impl,
)

from text_generation_shard.device.cpu.kernels import processor

LANES: Final = 16
"""Outputs, tokens or features that lie side by side in a vector."""
VECTOR_BYTES: Final = 64
INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()

_NUMBERS: Final = {
    types.boolean: ir.IntType(1),
    types.int8: ir.IntType(8),
    types.int16: ir.IntType(16),
    types.int32: INT32,
    types.float32: FLOAT,
}


class Vector(types.Type):
    """Numbers of one type that lie side by side in registers."""

    def __init__(self, number: Any, lanes: int) -> None:
        self.number, self.lanes = number, lanes
        self.code = ir.VectorType(_NUMBERS[number], lanes)
        self.bytes = 1 if number == types.boolean else number.bitwidth // 8
        self.is_real = isinstance(number, types.Float)
        super().__init__(f"vector({number} x {lanes})")

    def mask(self) -> "Vector":
        """What comparisons of such vectors give."""
        return Vector(types.boolean, self.lanes)

    def all(self, number: float) -> Any:
        """The constant with this number in every lane."""
        return ir.Constant(self.code, [number] * self.lanes)


FLOATS: Final = Vector(types.float32, LANES)
INTS: Final = Vector(types.int32, LANES)
SHORTS: Final = Vector(types.int16, LANES)
"""The bits of 16 bfloat16."""
WORDS: Final = Vector(types.int16, 2 * LANES)
"""The bits of 16 pairs of them."""
BYTES: Final = Vector(types.int8, VECTOR_BYTES)


class Table:
    """The constant vector of these numbers; seen by compiled code as a value."""

    def __init__(self, kind: Vector, numbers: Any) -> None:
        self.kind, self.numbers = kind, list(numbers)


def instruction(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function that writes its code. result: the type of what it gives, or
    a function that says so by the types of what it takes."""

    def decorate(write: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *taken: Any) -> Any:
            given = result if isinstance(result, types.Type) else result(*taken)

            def generate(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
                value = write(builder, kinds, *values)
                return context.get_dummy_value() if given == types.void else value

            return given(*taken), generate

        define.__name__, define.__doc__ = write.__name__, write.__doc__
        names = list(signature(write).parameters.values())
        # Of (the context, *values): what numba looks at.
        define.__signature__ = Signature(names[1:])  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(define)

    return decorate


def call_llvm(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """One of LLVM's own functions."""
    function = builder.module.globals.get(name)
    if function is None:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, function_type, name)
    return builder.call(function, arguments)


def pointer_to(builder: Any, address: Any, code: Any) -> Any:
    return builder.inttoptr(address, code.as_pointer())


def rounded_bits(builder: Any, bits: Any, constant: Callable[[int], Any]) -> Any:
    """Bits of float32, rounded to their upper halves, which become the lower ones."""
    last = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    return builder.lshr(builder.add(bits, builder.add(last, constant(0x7FFF))), constant(16))


@register_model(Vector)
class CodeModel(models.PrimitiveModel):
    """How values of a type lie in LLVM's code: as its `code`."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.code)


@typeof_impl.register(Table)
def _type_of_table(table: Table, context: Any) -> Vector:
    return table.kind


@lower_constant(Vector)
def _write_table(context: Any, builder: Any, kind: Vector, table: Table) -> Any:
    return ir.Constant(kind.code, table.numbers)


def fill(builder: Any, kind: Vector, number: Any) -> Any:
    """A vector of a number, which becomes one of the vector's type, or the vector that it is."""
    if isinstance(number.type, ir.VectorType):
        return number
    if isinstance(number.type, ir.DoubleType):
        number = builder.fptrunc(number, FLOAT)
    elif number.type != kind.code.element:
        number = builder.trunc(number, kind.code.element)
    first = builder.insert_element(ir.Constant(kind.code, ir.Undefined), number, INT32(0))
    order = ir.Constant(ir.VectorType(INT32, kind.lanes), [0] * kind.lanes)
    return builder.shuffle_vector(first, first, order)


_ARITHMETIC: Final = {
    operator.add: ("add", "fadd"),
    operator.sub: ("sub", "fsub"),
    operator.mul: ("mul", "fmul"),
    operator.truediv: ("sdiv", "fdiv"),
    operator.lshift: ("shl", ""),
    operator.rshift: ("lshr", ""),
    operator.and_: ("and_", ""),
    operator.or_: ("or_", ""),
}
_COMPARISONS: Final = {
    operator.gt: ">",
    operator.ge: ">=",
    operator.lt: "<",
    operator.le: "<=",
    operator.eq: "==",
    operator.ne: "!=",
}


def _define_operator(function: Any, write: Callable[..., Any], is_comparison: bool) -> None:
    """write: of (builder, the type of the vectors, left, right)."""

    @type_callable(function)
    def type_operator(context: Any) -> Any:
        def typer(left: Any, right: Any) -> Any:
            if isinstance(left, Vector) and (left == right or isinstance(right, types.Number)):
                return left.mask() if is_comparison else left
            return None

        return typer

    @lower_builtin(function, Vector, Vector)
    @lower_builtin(function, Vector, types.Number)
    def lower_operator(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        left, kind = values[0], kinds.args[0]
        return write(builder, kind, left, fill(builder, kind, values[1]))


def _combine(names: tuple[str, str], builder: Any, kind: Vector, left: Any, right: Any) -> Any:
    return getattr(builder, names[kind.is_real])(left, right)


def _compare(sign: str, builder: Any, kind: Vector, left: Any, right: Any) -> Any:
    return (builder.fcmp_ordered if kind.is_real else builder.icmp_signed)(sign, left, right)


for _function, _names in _ARITHMETIC.items():
    _define_operator(_function, partial(_combine, _names), is_comparison=False)
for _function, _sign in _COMPARISONS.items():
    _define_operator(_function, partial(_compare, _sign), is_comparison=True)


@instruction(lambda kind, address: kind.instance_type)
def load(builder: Any, kinds: Any, kind: Any, address: Any) -> Any:
    """The vector of this type at an address."""
    vector = kinds.return_type
    return builder.load(pointer_to(builder, address, vector.code), align=vector.bytes)


@instruction(types.void)
def store(builder: Any, kinds: Any, vector: Any, address: Any) -> Any:
    """Put a vector to an address."""
    builder.store(vector, pointer_to(builder, address, vector.type), align=kinds.args[0].bytes)


def _first(builder: Any, kind: Vector, count: Any) -> Any:
    """Where the first so many lanes are."""
    ints = Vector(types.int32, kind.lanes)
    lanes = ir.Constant(ints.code, list(range(kind.lanes)))
    return builder.icmp_signed("<", lanes, fill(builder, ints, count))


@instruction(lambda kind, address, count: kind.instance_type)
def load_first(builder: Any, kinds: Any, kind: Any, address: Any, count: Any) -> Any:
    """`load` of the first `count` lanes; the others are 0, and nothing is read there."""
    vector = kinds.return_type
    pointer, mask = pointer_to(builder, address, vector.code), _first(builder, vector, count)
    name, align = f"llvm.masked.load.{suffix(vector)}.p0", INT32(vector.bytes)
    return call_llvm(
        builder, name, vector.code, pointer, align, mask, ir.Constant(vector.code, None)
    )


@instruction(types.void)
def store_first(builder: Any, kinds: Any, vector: Any, address: Any, count: Any) -> Any:
    """`store` of the first `count` lanes; nothing is written behind them."""
    kind = kinds.args[0]
    pointer, mask = pointer_to(builder, address, kind.code), _first(builder, kind, count)
    name, align = f"llvm.masked.store.{suffix(kind)}.p0", INT32(kind.bytes)
    call_llvm(builder, name, ir.VoidType(), vector, pointer, align, mask)


def suffix(kind: Vector) -> str:
    """Of the names of LLVM's functions for such vectors."""
    return f"v{kind.lanes}{'f' if kind.is_real else 'i'}{kind.bytes * 8}"


@instruction(lambda kind, number: kind.instance_type)
def filled(builder: Any, kinds: Any, kind: Any, number: Any) -> Any:
    """A vector of a number."""
    return fill(builder, kinds.return_type, number)


@instruction(lambda kind, vector: kind.instance_type)
def reinterpreted(builder: Any, kinds: Any, kind: Any, vector: Any) -> Any:
    """The same bits as a vector of another type."""
    return builder.bitcast(vector, kinds.return_type.code)


@instruction(lambda kind, vector: kind.instance_type)
def converted(builder: Any, kinds: Any, kind: Any, vector: Any) -> Any:
    """The same numbers as those of another type: longer ones get zeros in front, shorter ones lose
    their upper bits, and what becomes a whole number its fraction."""
    wanted, own = kinds.return_type, kinds.args[1]
    if wanted.is_real != own.is_real:
        return (builder.sitofp if wanted.is_real else builder.fptosi)(vector, wanted.code)
    return (builder.zext if wanted.bytes > own.bytes else builder.trunc)(vector, wanted.code)


@instruction(lambda mask, left, right: left if isinstance(left, Vector) else right)
def chosen(builder: Any, kinds: Any, mask: Any, left: Any, right: Any) -> Any:
    """Of two vectors, or a vector and a number: lane by lane the first where the mask is set."""
    left, right = (fill(builder, kinds.return_type, value) for value in (left, right))
    return builder.select(mask, left, right)


@instruction(lambda kind, value: types.uint16 if kind == types.uint16 else types.float32)
def rounded(builder: Any, kinds: Any, kind: Any, value: Any) -> Any:
    """A float32 as a number of this kind: rounded to bfloat16 bits (to nearest, ties to even; not
    for NaN with other than the usual bits), or as it is."""
    if kinds.return_type != types.uint16:
        return value
    bits = rounded_bits(builder, builder.bitcast(value, INT32), INT32)
    return builder.trunc(bits, ir.IntType(16))


@instruction(types.float32)
def widened(builder: Any, kinds: Any, kind: Any, number: Any) -> Any:
    """A number of this kind as float32."""
    if kinds.args[0] != types.uint16:
        return number
    return builder.bitcast(builder.shl(builder.zext(number, INT32), INT32(16)), FLOAT)


@intrinsic
def outlined(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call a function with a tuple of arguments, and never have it compiled into what is around.
    There, a loop has hundreds of addresses computed in front of it: the compiler moves what does
    not change out of all loops, for each of the tiles that might be used. It must not raise."""
    one = function.get_call_type(typingctx, tuple(arguments), {})

    def generate(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        compiled = function.dispatcher.overloads[one.args]
        context.active_code_library.add_linking_library(compiled.library)
        code = context.declare_function(builder.module, compiled.fndesc)
        given = cgutils.unpack_tuple(builder, values[1], len(arguments))
        kinds = one.return_type, one.args
        context.call_conv.call_function(builder, code, *kinds, given, attrs=("noinline",))
        return context.get_dummy_value()

    return types.void(function, arguments), generate


@cache
def address_of(function: Any, signature: tuple[Any, ...]) -> int:
    """Where a compiled function lies, in the form that takes these types; for this process."""
    function.compile(signature)
    code = function.overloads[signature]
    return int(code.library.get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name))


@intrinsic
def call(typingctx: Any, code: Any, arguments: Any) -> Any:
    """Run the code at an address with a tuple of arguments, which must have the very types that it
    was compiled for; what it returns is ignored. It must not raise: numba prints an exception of
    code that is called this way, and goes on."""

    def generate(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments]
        code = ir.FunctionType(ir.VoidType(), kinds)
        given = cgutils.unpack_tuple(builder, values[1], len(kinds))
        builder.call(pointer_to(builder, values[0], code), given)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


def constant_of_type(number: Callable[[Any], int]) -> Any:
    """An intrinsic: a whole number that a function says of the type of the intrinsic's argument."""

    def write(builder: Any, kinds: Any, kind: Any) -> Any:
        return INT64(int(number(kinds.args[0])))

    return instruction(types.int64)(write)


itemsize = constant_of_type(lambda kind: kind.bitwidth // 8)


@instruction(lambda kind, address: types.CPointer(kind))
def array_at(builder: Any, kinds: Any, kind: Any, address: Any) -> Any:
    """A view of numbers of the marker's own type, to be indexed from 0 like a C pointer."""
    return pointer_to(builder, address, kind.type)


@instruction(types.int64)
def scratch(builder: Any, kinds: Any, num_vectors: Any) -> Any:
    """The address of so many vectors (a literal) on the stack of the function that calls this. They
    are the same ones whenever that call is repeated, and uninitialized on entry."""
    with builder.goto_entry_block():
        size = VECTOR_BYTES * kinds.args[0].literal_value
        memory = builder.alloca(ir.IntType(8), size=INT32(size))
        memory.align = VECTOR_BYTES
    return builder.ptrtoint(memory, INT64)


@instruction(types.void)
def fetch(builder: Any, kinds: Any, address: Any) -> None:
    """Have what lies at an address brought into the second-level cache; beyond the end of the
    memory that does nothing."""
    pointer = pointer_to(builder, address, ir.IntType(8))
    is_read, locality, is_data = INT32(0), INT32(2), INT32(1)
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, is_read, locality, is_data)


@instruction(types.int64)
def get_word(builder: Any, kinds: Any, address: Any) -> Any:
    """The word at an address; with it, all that its thread wrote before it put it."""
    return builder.load_atomic(pointer_to(builder, address, INT64), "acquire", 8)


@instruction(types.void)
def put_word(builder: Any, kinds: Any, address: Any, value: Any) -> None:
    """Put a word to an address."""
    builder.store_atomic(value, pointer_to(builder, address, INT64), "release", 8)


@instruction(types.boolean)
def exchange_word(builder: Any, kinds: Any, address: Any, expected: Any, value: Any) -> Any:
    """Put a word to an address if it holds what is expected there; whether it did."""
    pointer = pointer_to(builder, address, INT64)
    found = builder.cmpxchg(pointer, expected, value, "acq_rel", "acquire")
    return builder.extract_value(found, 1)


@instruction(types.void)
def fence(builder: Any, kinds: Any) -> None:
    """What this thread has put is there for others before it gets anything more."""
    builder.fence("seq_cst")


@instruction(types.void)
def pause(builder: Any, kinds: Any) -> None:
    """Say that this is a loop that waits for a word."""
    if processor.is_x86():
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif processor.is_arm():
        # What others wait with there: as long as a pause, where a hint to yield is nothing.
        call_llvm(builder, "llvm.aarch64.isb", ir.VoidType(), INT32(15))


@instruction(types.void)
def give_way(builder: Any, kinds: Any) -> None:
    """Let others have this core first."""
    call_llvm(builder, "sched_yield", INT32)
