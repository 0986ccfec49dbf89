"""Model loading: weight files, quantised checkpoints, tokenizers and chat templates."""
