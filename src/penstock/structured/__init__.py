"""Structured outputs: schemas checked keyword by keyword, and grammars compiled outside the step loop."""
