"""LoRA adapters: reading of PEFT checkpoints, adapter tables of a model, and the cache of adapters."""
