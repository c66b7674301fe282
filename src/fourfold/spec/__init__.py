"""Describe: the types that every part of fourfold speaks, and the catalogue behind their names."""
