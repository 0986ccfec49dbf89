"""Responses API: requests as conversations, answers as items, and the store of responses."""
