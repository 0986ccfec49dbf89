"""A checkpoint for CTranslate2.

python -m benchmarks.peers.convert.ctranslate2_model CHECKPOINT FOLDER float32|int8|default
"""

from __future__ import annotations

import sys

from ctranslate2.converters import TransformersConverter


def convert(checkpoint: str, folder: str, precision: str) -> None:
    TransformersConverter(checkpoint).convert(
        folder, quantization=None if precision == "default" else precision, force=True
    )


if __name__ == "__main__":
    convert(*sys.argv[1:])
