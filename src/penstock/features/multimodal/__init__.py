"""Images, audio and video in prompts."""
