"""Keep: what was predicted for a run and what it measured, as facts."""
