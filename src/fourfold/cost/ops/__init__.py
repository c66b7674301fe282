"""What a rank does in a step, operation by operation."""
