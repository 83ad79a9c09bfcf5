"""Intrinsics for operations that numba lacks. Only this file, `vector` and `exchange` emit LLVM IR.

Vectors are values of compiled code, which variables, tuples and arguments may hold. `+ - * /`, `<<
>> & |` and comparisons are lane by lane; `>>` is a logical shift, and a number on the right is
broadcast. Nothing is reordered or fused. A comparison returns a mask, a vector of booleans.
Addresses are int64. Threads communicate by words, int64 that are read and written atomically with
acquire and release order.

Each function here emits the code of one intrinsic, from the builder, the types and the values.
"""

import operator
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import Signature, signature
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import lower_constant
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    register_model,
    type_callable,
    typeof_impl,
)

from text_generation_shard.device.cpu.kernels import is_arm, is_x86

LANES: Final = 16
"""Outputs, tokens or features of a vector."""
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
    """The numba type of a vector of numbers."""

    def __init__(self, number: Any, lanes: int) -> None:
        self.number, self.lanes = number, lanes
        self.code = ir.VectorType(_NUMBERS[number], lanes)
        self.bytes = 1 if number == types.boolean else number.bitwidth // 8
        self.is_real = isinstance(number, types.Float)
        super().__init__(f"vector({number} x {lanes})")

    def mask(self) -> "Vector":
        """The result type of comparisons."""
        return Vector(types.boolean, self.lanes)

    def all(self, number: float) -> Any:
        """The constant vector of this number."""
        return ir.Constant(self.code, [number] * self.lanes)


FLOATS: Final = Vector(types.float32, LANES)
INTS: Final = Vector(types.int32, LANES)
SHORTS: Final = Vector(types.int16, LANES)
"""The bits of 16 bfloat16."""
WORDS: Final = Vector(types.int16, 2 * LANES)
"""The bits of 16 pairs of bfloat16."""
BYTES: Final = Vector(types.int8, VECTOR_BYTES)


class Table:
    """A constant vector; a global of this type is a vector value in compiled code."""

    def __init__(self, kind: Vector, numbers: Any) -> None:
        self.kind, self.numbers = kind, list(numbers)


def instruction(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic from a function that emits its code. result: the result type, or a function
    from the argument types to it."""

    def decorate(write: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *taken: Any) -> Any:
            given = result if isinstance(result, types.Type) else result(*taken)

            def generate(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
                value = write(builder, kinds, *values)
                return context.get_dummy_value() if given == types.void else value

            return given(*taken), generate

        define.__name__, define.__doc__ = write.__name__, write.__doc__
        names = list(signature(write).parameters.values())
        # numba inspects the signature (context, *values).
        define.__signature__ = Signature(names[1:])  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(define)

    return decorate


def call_llvm(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call a function by name, such as an LLVM intrinsic."""
    function = builder.module.globals.get(name)
    if function is None:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, function_type, name)
    return builder.call(function, arguments)


def pointer_to(builder: Any, address: Any, code: Any) -> Any:
    return builder.inttoptr(address, code.as_pointer())


def rounded_bits(builder: Any, bits: Any, constant: Callable[[int], Any]) -> Any:
    """Round float32 bits to their upper halves, returned in the lower halves."""
    last = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    return builder.lshr(builder.add(bits, builder.add(last, constant(0x7FFF))), constant(16))


@register_model(Vector)
class CodeModel(models.PrimitiveModel):
    """Represents values of a type in LLVM by the type's `code`."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.code)


@typeof_impl.register(Table)
def _type_of_table(table: Table, context: Any) -> Vector:
    return table.kind


@lower_constant(Vector)
def _write_table(context: Any, builder: Any, kind: Vector, table: Table) -> Any:
    return ir.Constant(kind.code, table.numbers)


def fill(builder: Any, kind: Vector, number: Any) -> Any:
    """Convert a number to the vector's element type and broadcast it; a vector is returned
    unchanged."""
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
    """`write` takes (builder, vector type, left, right)."""

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
    """Load the vector of this type at an address."""
    vector = kinds.return_type
    return builder.load(pointer_to(builder, address, vector.code), align=vector.bytes)


@instruction(types.void)
def store(builder: Any, kinds: Any, vector: Any, address: Any) -> Any:
    """Store a vector at an address."""
    builder.store(vector, pointer_to(builder, address, vector.type), align=kinds.args[0].bytes)


def _first(builder: Any, kind: Vector, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    ints = Vector(types.int32, kind.lanes)
    lanes = ir.Constant(ints.code, list(range(kind.lanes)))
    return builder.icmp_signed("<", lanes, fill(builder, ints, count))


@instruction(lambda kind, address, count: kind.instance_type)
def load_first(builder: Any, kinds: Any, kind: Any, address: Any, count: Any) -> Any:
    """`load` the first `count` lanes; the others are 0 and not read."""
    vector = kinds.return_type
    pointer, mask = pointer_to(builder, address, vector.code), _first(builder, vector, count)
    name, align = f"llvm.masked.load.{suffix(vector)}.p0", INT32(vector.bytes)
    return call_llvm(
        builder, name, vector.code, pointer, align, mask, ir.Constant(vector.code, None)
    )


@instruction(types.void)
def store_first(builder: Any, kinds: Any, vector: Any, address: Any, count: Any) -> Any:
    """`store` the first `count` lanes; memory after them is not written."""
    kind = kinds.args[0]
    pointer, mask = pointer_to(builder, address, kind.code), _first(builder, kind, count)
    name, align = f"llvm.masked.store.{suffix(kind)}.p0", INT32(kind.bytes)
    call_llvm(builder, name, ir.VoidType(), vector, pointer, align, mask)


def suffix(kind: Vector) -> str:
    """Suffix of LLVM intrinsics for such vectors."""
    return f"v{kind.lanes}{'f' if kind.is_real else 'i'}{kind.bytes * 8}"


@instruction(lambda kind, number: kind.instance_type)
def filled(builder: Any, kinds: Any, kind: Any, number: Any) -> Any:
    """Broadcast a number."""
    return fill(builder, kinds.return_type, number)


@instruction(lambda kind, vector: kind.instance_type)
def reinterpreted(builder: Any, kinds: Any, kind: Any, vector: Any) -> Any:
    """The same bits as a vector of another type."""
    return builder.bitcast(vector, kinds.return_type.code)


@instruction(lambda kind, vector: kind.instance_type)
def converted(builder: Any, kinds: Any, kind: Any, vector: Any) -> Any:
    """Convert to another element type: zero extension, truncation, or conversion between float and
    integer (towards zero)."""
    wanted, own = kinds.return_type, kinds.args[1]
    if wanted.is_real != own.is_real:
        return (builder.sitofp if wanted.is_real else builder.fptosi)(vector, wanted.code)
    return (builder.zext if wanted.bytes > own.bytes else builder.trunc)(vector, wanted.code)


@instruction(lambda mask, left, right: left if isinstance(left, Vector) else right)
def chosen(builder: Any, kinds: Any, mask: Any, left: Any, right: Any) -> Any:
    """Select lane by lane: left where the mask is set, else right. One of them may be a number."""
    left, right = (fill(builder, kinds.return_type, value) for value in (left, right))
    return builder.select(mask, left, right)


@instruction(lambda kind, value: types.uint16 if kind == types.uint16 else types.float32)
def rounded(builder: Any, kinds: Any, kind: Any, value: Any) -> Any:
    """A float32 as a number of this kind: rounded to bfloat16 bits (to nearest, ties to even; wrong
    for NaN with unusual bits), or unchanged."""
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
    """Call a function with a tuple of arguments, without inlining. With inlining, the compiler
    would hoist the invariant addresses of every tile's loop, also of tiles that are not used. The
    function must not raise."""
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
    """Address in this process of a function compiled for this signature."""
    function.compile(signature)
    code = function.overloads[signature]
    return int(code.library.get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name))


def _all_kinds(kinds: Any) -> Iterator[Any]:
    """The types in a tuple of types, also within structs."""
    for kind in kinds:
        if isinstance(kind, types.BaseTuple):
            yield from _all_kinds(kind)
        else:
            yield kind


@intrinsic
def call(typingctx: Any, code: Any, arguments: Any) -> Any:
    """Call the code at an address with a tuple of arguments of exactly the types it was compiled
    for; its result is ignored. It must not raise: numba prints the exception and continues. Arrays
    with gaps are refused when the caller is compiled."""
    if strided := [kind for kind in _all_kinds(arguments) if getattr(kind, "layout", "C") != "C"]:
        raise TypingError(f"the called code would misread {strided[0]}, which is not contiguous")

    def generate(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments]
        code = ir.FunctionType(ir.VoidType(), kinds)
        given = cgutils.unpack_tuple(builder, values[1], len(kinds))
        builder.call(pointer_to(builder, values[0], code), given)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


def constant_of_type(number: Callable[[Any], int]) -> Any:
    """An intrinsic that returns an integer, computed from the type of its argument."""

    def write(builder: Any, kinds: Any, kind: Any) -> Any:
        return INT64(int(number(kinds.args[0])))

    return instruction(types.int64)(write)


itemsize = constant_of_type(lambda kind: kind.bitwidth // 8)


@instruction(lambda kind, address: types.CPointer(kind))
def array_at(builder: Any, kinds: Any, kind: Any, address: Any) -> Any:
    """A view of memory as numbers of the marker's type, indexed like a C pointer."""
    return pointer_to(builder, address, kind.type)


@instruction(types.int64)
def scratch(builder: Any, kinds: Any, num_vectors: Any) -> Any:
    """Address of `num_vectors` (a literal) vectors on the caller's stack. Repeated calls return the
    same memory; it is uninitialized on entry."""
    with builder.goto_entry_block():
        size = VECTOR_BYTES * kinds.args[0].literal_value
        memory = builder.alloca(ir.IntType(8), size=INT32(size))
        memory.align = VECTOR_BYTES
    return builder.ptrtoint(memory, INT64)


@instruction(types.void)
def fetch(builder: Any, kinds: Any, address: Any) -> None:
    """Prefetch the line at an address into the second-level cache; has no effect beyond the end of
    the memory."""
    pointer = pointer_to(builder, address, ir.IntType(8))
    is_read, locality, is_data = INT32(0), INT32(2), INT32(1)
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, is_read, locality, is_data)


@instruction(types.int64)
def load_word(builder: Any, kinds: Any, address: Any) -> Any:
    """Load a word, with acquire order."""
    return builder.load_atomic(pointer_to(builder, address, INT64), "acquire", 8)


@instruction(types.void)
def store_word(builder: Any, kinds: Any, address: Any, value: Any) -> None:
    """Store a word, with release order."""
    builder.store_atomic(value, pointer_to(builder, address, INT64), "release", 8)


@instruction(types.boolean)
def compare_exchange(builder: Any, kinds: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare-and-exchange a word; whether it succeeded."""
    pointer = pointer_to(builder, address, INT64)
    found = builder.cmpxchg(pointer, expected, value, "acq_rel", "acquire")
    return builder.extract_value(found, 1)


@instruction(types.void)
def fence(builder: Any, kinds: Any) -> None:
    """A sequentially consistent fence."""
    builder.fence("seq_cst")


@instruction(types.void)
def pause(builder: Any, kinds: Any) -> None:
    """A hint to the processor that this is a spin loop."""
    if is_x86():
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif is_arm():
        # As long as an x86 pause; ARM's yield hint does nothing.
        call_llvm(builder, "llvm.aarch64.isb", ir.VoidType(), INT32(15))


@instruction(types.void)
def yield_core(builder: Any, kinds: Any) -> None:
    """Yield the core to other threads."""
    call_llvm(builder, "sched_yield", INT32)
