"""Files and batches of OpenAI's API: requests that the server answers without a connection."""
