"""Training state to files and back, whatever layout wrote it."""
