"""Counts and times of an engine."""
