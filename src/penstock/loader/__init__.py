"""Checkpoints into models."""
