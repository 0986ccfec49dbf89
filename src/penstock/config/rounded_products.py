"""What the arithmetic of memory has to know of products with quantised weights (`kernels/quantized.py`, in torch)."""

# Values that are widened at once, to float64: 8 MiB. Large enough for products at full speed.
_MAX_WIDENED = 1 << 20
# Else the sums of many rows would take the most, where groups are small.
_MAX_OUTPUTS = 2048


def outputs_at_once(group_size: int) -> int:
    """Output features whose weights are widened at once, for one group of so many input features."""
    return max(1, min(_MAX_OUTPUTS, _MAX_WIDENED // group_size))


def rows_at_once(num_inputs: int) -> int:
    """Rows of activations that are rounded at once."""
    return max(1, _MAX_WIDENED // num_inputs)
