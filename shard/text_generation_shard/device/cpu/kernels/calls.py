"""Kernels that call others where these lie, instead of holding copies of them, and what they take.

A function that numba compiles contains all that it calls, optimised anew, and one with a loop in
threads contains the body of the loop four times over. By address each is compiled once: the layers
of a model in a fifth of the time. Worth it for what runs for microseconds; the call is one of C.

What many of a kernel's arguments describe together is a NamedTuple, whose fields are of the types
below, from which `struct_type` makes what numba takes apart.
"""

from functools import cache
from typing import Annotated, Any, get_type_hints

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int32, int64, types
from numba.core import cgutils
from numba.extending import intrinsic

Address = Annotated[int, int64]
"""Of the first byte, as int64; 0 where a field may be missing."""
Count = Annotated[int, int64]
Flag = Annotated[bool, boolean]
Real = Annotated[np.float32, float32]
Ints = Annotated[Any, int64[::1]]
"""An array, contiguous, as those below."""
IntRows = Annotated[Any, int64[:, ::1]]
ShortRows = Annotated[Any, int32[:, ::1]]
Reals = Annotated[Any, float32[::1]]
RealRows = Annotated[Any, float32[:, ::1]]
FlagRows = Annotated[Any, boolean[:, ::1]]


def struct_type(struct: type, **others: Any) -> Any:
    """The numba type of a NamedTuple; others: types of the fields whose annotation has none."""
    hints = get_type_hints(struct, include_extras=True)
    fields = [others.get(name) or hint.__metadata__[0] for name, hint in hints.items()]
    return types.BaseTuple.from_types(fields, struct)


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

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments]
        code = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        given = cgutils.unpack_tuple(builder, values[1], len(kinds))
        builder.call(builder.inttoptr(values[0], code), given)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate
