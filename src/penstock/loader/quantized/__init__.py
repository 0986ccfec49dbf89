"""Quantisation at load, and quantised checkpoints."""
