"""Linear layers whose weights are integers of 8 or 4 bits."""
