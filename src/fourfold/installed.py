"""The installed package: its version, and the folder that other processes import it from."""

import os

__version__ = "0.1.0"
SOURCE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
