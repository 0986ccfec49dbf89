"""Processors put together from a model's files, for those of Transformers that need more packages."""
