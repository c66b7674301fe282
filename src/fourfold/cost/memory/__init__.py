"""Bytes of each stage at its peak, and how sure they are."""
