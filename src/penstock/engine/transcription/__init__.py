"""Transcription of speech: a sound is cut into pieces, each of which is a request, and their answers are one text."""
