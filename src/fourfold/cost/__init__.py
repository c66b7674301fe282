"""Predict: what a layout costs in parameters, FLOPs, seconds and bytes. Pure Python and NumPy."""
