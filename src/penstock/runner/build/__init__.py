"""Building of steps: frames, batches, layouts and padding."""
