"""Benchmarks of `penstock bench`.

Prompts are random token ids, so no data is needed; generation is greedy and ignores end tokens, so every run does the
same work.
"""
