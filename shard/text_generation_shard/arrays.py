"""The numbers that the host keeps and counts with.

In numpy: between two passes, when nothing of it is in the caches any more, an operation on a few of
them costs a fifth of what it costs torch.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
