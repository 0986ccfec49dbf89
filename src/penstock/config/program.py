"""What the arithmetic of memory has to know of programs of CPU kernels (`kernels/native/program.py`)."""

# Rows that go from kernel to kernel together, between two attentions: enough for products at full speed, few enough
# that what one kernel leaves is in a cache when the next one takes it.
PROGRAM_ROWS = 256
