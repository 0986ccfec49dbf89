"""Weights from GGUF files."""
