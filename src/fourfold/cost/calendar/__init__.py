"""From steps to a training's days: interruptions, checkpoints, spares and slow hosts."""
