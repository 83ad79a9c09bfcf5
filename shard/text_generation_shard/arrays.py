"""Types of arrays on the host.

The host computes in numpy: on small arrays its operations are faster than torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Array = NDArray[Any]
NO_INTS: Ints = np.empty(0, dtype=np.int64)
Upload = Callable[[Sequence[Array]], Sequence[Tensor]]
"""See `Device.upload`."""


def plain_upload(device: torch.device) -> Upload:
    """An upload by synchronous copies; on the CPU without copies."""
    if device.type == "cpu":
        # `to` would take time even without a copy.
        return lambda arrays: [torch.from_numpy(array) for array in arrays]
    return lambda arrays: [torch.from_numpy(array).to(device) for array in arrays]
