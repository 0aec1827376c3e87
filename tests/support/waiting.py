"""Waiting for what nobody tells about."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait until a condition holds that no event announces.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - there is no event, that is the point
            await asyncio.sleep(0.002)
