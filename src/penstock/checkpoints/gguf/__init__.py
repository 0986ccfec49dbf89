"""GGUF files: header, metadata, and the model folder that is made from them."""
