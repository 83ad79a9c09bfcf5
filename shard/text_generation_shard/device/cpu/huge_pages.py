"""Weights in pages of 2 MiB, brought there while the server answers already.

Why it is fast: a decode step reads every weight once, and the processor fetches ahead only to the
end of a page. Two threads read 29 GB/s from huge pages here and 24 from small ones; a step of one
row of the 125 M checkpoint takes 4 % less with two threads and 8 % less with one.

Where the C library allocates huge pages (the launcher asks glibc to), this finds the rest: what was
put where other memory had been freed, a fifth of that checkpoint. Elsewhere it finds all.
"""

import ctypes
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

PAGE_BYTES = 2 * 2**20
# From linux/mman.h; Linux 6.1 is the first that has it, whatever its transparent huge pages are.
_COLLAPSE = 25
# Where so many in a row can not be moved, none can.
_PATIENCE = 8
# A page is moved in some 5 ms, in which whoever reads it waits. Not all at once, so that a step
# meets few that are moving: some 14 GB take a minute.
_PAUSE_S = 0.005


def pages_of(regions: Iterable[tuple[int, int]]) -> list[int]:
    """The addresses of the pages of which regions (address, bytes) fill half at least: what else
    lies there takes memory too, once the page is one."""
    filled: Counter[int] = Counter()
    for start, size in regions:
        end = start + size
        for page in range(start // PAGE_BYTES, -(-end // PAGE_BYTES)):
            first, last = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
            filled[page] += min(end, last) - max(start, first)
    return sorted(page * PAGE_BYTES for page, count in filled.items() if 2 * count >= PAGE_BYTES)


def collapse(pages: Sequence[int]) -> int:
    """Make huge pages of what lies at these addresses; returns how many are, at most. A page that
    the system has no memory in one piece for stays as it is, and so does one of several maps."""
    advise = _advise()
    done = 0
    for place, page in enumerate(pages):
        if advise(page):
            done += 1
        elif done == 0 and place + 1 == _PATIENCE:
            break
        time.sleep(_PAUSE_S)
    size = PAGE_BYTES / 1e9
    logger.info("%.2f of %.2f GB of weights lie in huge pages", done * size, len(pages) * size)
    return done


def _advise() -> Callable[[int], bool]:
    """What makes one of the page at an address, and says whether it is."""
    system = getattr(ctypes.CDLL(None), "madvise", None)
    size = ctypes.c_size_t(PAGE_BYTES)
    return lambda page: system is not None and not system(ctypes.c_void_p(page), size, _COLLAPSE)
