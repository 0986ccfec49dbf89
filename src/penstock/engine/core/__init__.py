"""The engine core: the loop of steps, its interface and its recovery."""
