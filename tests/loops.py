"""Coroutines of tests, beside a browser."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def awaited(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: once a page was opened, the browser's driver has a loop in the main
    thread until the session ends (tests/page/conftest.py)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
