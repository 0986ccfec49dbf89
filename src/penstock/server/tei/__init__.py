"""API of Text Embeddings Inference (TEI): a thin face over the pooling requests of the other APIs."""
