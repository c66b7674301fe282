"""Runs in an environment of torchtitan 0.3: prints its configuration as its trainer does, by the
arguments of exported settings."""

from __future__ import annotations

import sys

from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

if __name__ == "__main__":
    init_logger()
    config = ConfigManager().parse_args(sys.argv[1:])
    config.debug.print_config = True
    config.maybe_log()
