"""Trains the demo model that Penstock ships: `python -m tools.train_demo --corpus tinyshakespeare.txt --out DIR`."""
