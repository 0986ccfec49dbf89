"""Messages API, in the shape of Anthropic."""
