"""Arrays in messages: bytes with a dtype and a shape, cheaper than lists of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np


class ArrayBytes(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """An array of numbers.

    dtype: numpy's name, such as "float32". data: row-major, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: Any) -> ArrayBytes:
        """Serialise an array, or anything that `numpy.asarray` accepts."""
        import numpy as np

        array = np.asarray(values)
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        return cls(dtype=array.dtype.name, shape=array.shape, data=data)

    def to_numpy(self) -> np.ndarray:
        """Return the read-only array. Raises ValueError for a wrong number of bytes."""
        import numpy as np

        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)
