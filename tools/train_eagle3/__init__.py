"""Trains the demo model's EAGLE-3 head: `python -m tools.train_eagle3 --corpus tinyshakespeare.txt --out DIR`."""
