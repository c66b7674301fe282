"""What a worker can be asked to do, one module per kind of job."""
