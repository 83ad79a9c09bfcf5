"""What kernels take: what many arguments describe together is a NamedTuple, whose fields are of the
types below, from which `struct_type` makes what numba takes apart."""

from typing import Annotated, Any, get_type_hints

import numpy as np
from numba import boolean, float32, int32, int64, types

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
