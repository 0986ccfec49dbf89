"""Encoders of images, audio and video for language models, a file per family of encoder."""
