"""Moves weights to huge pages of 2 MiB in the background, while the server answers requests.

Why it is fast: a decode step reads every weight once, and the hardware prefetcher stops at the end
of a page.

If the C library allocates huge pages (the launcher configures glibc so), this moves only the rest:
weights in reused memory. Otherwise it moves all weights.
"""

import ctypes
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

PAGE_BYTES = 2 * 2**20
# MADV_COLLAPSE of linux/mman.h, since Linux 6.1; independent of the setting of transparent huge
# pages.
_COLLAPSE = 25
# If this number of pages fail from the start, all others are skipped.
_PATIENCE = 8
# Reads of a page block while it is moved. The pause lets a step meet few such pages.
_PAUSE_S = 0.005


def pages_of(regions: Iterable[tuple[int, int]]) -> list[int]:
    """Addresses of the huge pages that regions (address, bytes) fill at least half: a huge page
    takes all of its memory."""
    filled: Counter[int] = Counter()
    for start, size in regions:
        end = start + size
        for page in range(start // PAGE_BYTES, -(-end // PAGE_BYTES)):
            first, last = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
            filled[page] += min(end, last) - max(start, first)
    return sorted(page * PAGE_BYTES for page, count in filled.items() if 2 * count >= PAGE_BYTES)


def collapse(pages: Sequence[int]) -> int:
    """Convert the pages at these addresses to huge pages; returns how many succeeded. A page stays
    as it is if the system has no contiguous memory, or if it spans several mappings."""
    advise = _advise()
    done = 0
    for place, page in enumerate(pages):
        if advise(page):
            done += 1
        elif done == 0 and place + 1 == _PATIENCE:
            break
        time.sleep(_PAUSE_S)
    size = PAGE_BYTES / 1e9
    logger.info("%.2f of %.2f GB of weights are in huge pages", done * size, len(pages) * size)
    return done


def _advise() -> Callable[[int], bool]:
    """A function that collapses the page at an address; returns whether it succeeded."""
    system = getattr(ctypes.CDLL(None), "madvise", None)
    size = ctypes.c_size_t(PAGE_BYTES)
    return lambda page: system is not None and not system(ctypes.c_void_p(page), size, _COLLAPSE)
