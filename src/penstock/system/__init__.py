"""Access to the operating system: environment variables, locks of files, temporary folders."""
