"""Argument structs of kernels: NamedTuples with fields of the types below, which `struct_type`
converts to numba types."""

from typing import Annotated, Any, get_type_hints

import numpy as np
from numba import boolean, float32, int32, int64, types

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
FlagRows = Annotated[Any, boolean[:, ::1]]


def struct_type(struct: type, **others: Any) -> Any:
    """The numba type of a NamedTuple; others: types of fields without one in their annotation."""
    hints = get_type_hints(struct, include_extras=True)
    fields = [others.get(name) or hint.__metadata__[0] for name, hint in hints.items()]
    return types.BaseTuple.from_types(fields, struct)
