"""Chat templates: their files, and their rendering in processes of their own."""
