"""A single-device decoder: no mesh, no rank, no collective. Parallelism is applied from outside."""
