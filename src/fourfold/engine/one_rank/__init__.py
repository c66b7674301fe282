"""One rank of a large world on one device, its peers emulated."""
