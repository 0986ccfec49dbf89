"""How fast an engine is with one's own model, on this machine: what `penstock bench` measures.

Prompts are random token ids, so no data is needed; generation is greedy and ignores end tokens, so every run does the
same work.
"""
