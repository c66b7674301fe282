"""Seconds of a step: matrix products, attention, traffic, host, pipeline."""
