"""Features of the engine, a folder each: their scheduler's side, worker's side, messages, memory and refusals."""
