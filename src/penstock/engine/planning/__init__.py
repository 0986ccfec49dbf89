"""Memory of an engine, planned before it starts."""
