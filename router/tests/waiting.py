"""Waiting for what must happen soon."""

import asyncio
from collections.abc import Callable

# Turns of the loop before time passes, too: in virtual time it passes at once.
_TURNS = 100
_PAUSE_S = 0.001
_PATIENCE_S = 60.0


async def until(is_true: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
    """Returns once it is true, which costs a failing test alone `patience_s`."""
    for _ in range(_TURNS):
        if is_true():
            return
        await asyncio.sleep(0)
    async with asyncio.timeout(patience_s):
        while not is_true():
            await asyncio.sleep(_PAUSE_S)
