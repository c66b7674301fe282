"""One training step: trainer, optimizer, gradients, loss scale, initial weights."""
