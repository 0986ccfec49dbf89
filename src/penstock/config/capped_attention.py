"""What the arithmetic of memory has to know of soft-capped attention in plain torch (`kernels/paged_attention.py`)."""

# Capped scores are in memory for so many queries at once, or for less of them: 4 MiB, or those of one query.
_CAPPED_QUERIES = 16
_MAX_SCORES = 1 << 20


def capped_queries(num_heads: int, num_positions: int) -> int:
    """Queries whose scores are in memory at once, of attention over so many positions."""
    return max(1, min(_CAPPED_QUERIES, _MAX_SCORES // (num_heads * num_positions)))
