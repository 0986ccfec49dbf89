"""Readers of model files: configuration, tokenizers, GGUF, sentence-transformers, and the folders that hold them."""
