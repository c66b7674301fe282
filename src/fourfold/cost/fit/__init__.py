"""Coefficients fitted to measured runs, their evidence and accuracy."""
