"""Requests: prompts and parameters, checked and tokenised."""
