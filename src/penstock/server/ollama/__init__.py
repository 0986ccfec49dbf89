"""Ollama's API: a thin face over the chat, completion and pooling requests of the other APIs."""
