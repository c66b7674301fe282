"""Profiler traces: steps, parts and settings of a run, beside what is expected of it."""
