"""Outputs of requests: text, samples and streams."""
