"""Media in prompts on the front end: sources, decoding, processing, and placeholders."""
