"""Recording of the messages between scheduler and workers, and their replay into other workers."""
