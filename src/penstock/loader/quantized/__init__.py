"""Weights that become integers while they are loaded, or are so already in the checkpoint."""
