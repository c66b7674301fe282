"""`fourfold serve` in a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(*words: str) -> Iterator[str]:
    """Its address; in the end nothing went wrong in it."""
    command = [sys.executable, "-m", "fourfold", "serve", "--port", "0", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())[0]
    finally:
        process.terminate()
        assert "Traceback" not in process.communicate()[1]
