"""Images, audio and video: from URLs, files, base64 and arrays to decoded items within limits."""
