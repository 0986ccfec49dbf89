"""Live view of an engine: its numbers at one moment, without prompts or texts."""
