"""CPU kernels, compiled by numba from Python, and the structs of their arguments.

`compile.prepare` must be called first.
"""

from typing import Annotated, Any, get_type_hints

import numpy as np
from numba import boolean, float32, int32, int64, types

from text_generation_shard.device.cpu.kernels.processor import are_vectors_wide as are_vectors_wide

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
