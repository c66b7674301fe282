"""Parameters, FLOPs and layers per stage: exact counts."""
