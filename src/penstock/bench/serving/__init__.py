"""Load generator for OpenAI-compatible servers: `penstock bench serve`.

It shares the cores with the server that it measures, so a chunk must cost it little: responses are parsed where they
arrive, without a task, a thread or a queue in between.
"""
