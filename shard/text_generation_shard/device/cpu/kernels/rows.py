"""From rows of the table to what a pass of one token each reads and writes.

Why it is fast: between two steps nothing is in the caches any more, and the two dozen operations of
numpy that this takes come to 0.14 ms, one call of compiled code to 0.04. It keeps the interpreter's
lock: the event loop, once it has it, keeps it for half a millisecond.
"""

from typing import Any, Final

import numpy as np
from numba import int32, int64, njit

from text_generation_shard.device.cpu.kernels.attention import BLOCK_SIZE, TASK_ROWS

PLANNED: Final = (int64[::1], int64[::1], int32[:, ::1], int64[:, ::1], int64, int64)
"""What `plan_rows` takes."""


@njit(cache=True, boundscheck=False)
def plan_rows(
    rows: Any, starts: Any, token_ids: Any, block_tables: Any, group: int, num_threads: int
) -> Any:
    """Of the tokens at `starts` [R] of rows [R] of the table: ids [R], slots [R], and the tasks
    [N, 5] of `attend`, whose rows are those of block_tables; group: query heads of a KV head."""
    input_ids, slots = np.empty_like(rows), np.empty_like(rows)
    for place in range(len(rows)):
        row, start = rows[place], starts[place]
        input_ids[place] = token_ids[row, start]
        block = block_tables[row, start // BLOCK_SIZE]
        slots[place] = block * BLOCK_SIZE + start % BLOCK_SIZE
    parts = -(-group // TASK_ROWS)
    tasks = np.empty((len(rows) * parts, 5), np.int64)
    # Dealt to the threads from the longest on, who get a part each.
    order = np.argsort(-starts, kind="mergesort")
    count = 0
    for thread in range(num_threads):
        for place in range(thread, len(tasks), num_threads):
            row, task = order[place // parts], tasks[count]
            task[0], task[1], task[2] = rows[row], row, starts[row]
            task[3], task[4] = place % parts * TASK_ROWS, group
            count += 1
    return input_ids, slots, tasks
