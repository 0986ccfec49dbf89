"""Tokenizer and detokeniser."""
