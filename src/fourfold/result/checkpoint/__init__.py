"""A checkpoint's folder, index and state, read without torch."""
