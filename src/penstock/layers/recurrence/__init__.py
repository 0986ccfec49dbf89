"""Recurrent layers: their state between steps, and the operations that they are made of."""
