"""Front end's side of images, audio and video: from what callers give to items of a prompt."""
