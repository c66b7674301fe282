"""A layout against one process: the reference, the comparison, planted faults."""
