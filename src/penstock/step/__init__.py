"""A step as plain data: its message, batch, inputs, wanted outputs and results. Nothing here builds or runs it."""
