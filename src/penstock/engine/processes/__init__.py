"""Processes of an engine: broker, cores and their supervision."""
