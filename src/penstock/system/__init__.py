"""What the operating system gives a process: environment variables, locks of files, temporary folders."""
