"""Rows of a table of measured runs, as runs: read, and resolved as plans are."""
