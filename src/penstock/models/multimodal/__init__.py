"""Multimodal models: language models with encoders of images, audio and video."""
