"""A loop that runs in a thread, as the coordinator's does in its process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")


@contextmanager
def looping() -> Iterator[asyncio.AbstractEventLoop]:
    """A running loop. When the block ends, its tasks are cancelled."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await loop.shutdown_default_executor()

        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def call(loop: asyncio.AbstractEventLoop, function: Callable[[], _Result]) -> _Result:
    """Call the function on the loop's thread."""

    async def called() -> _Result:
        return function()

    return asyncio.run_coroutine_threadsafe(called(), loop).result(60)
