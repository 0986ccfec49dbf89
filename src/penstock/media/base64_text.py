"""Base64 of media in requests."""

from __future__ import annotations

import binascii


def base64_bytes(text: str) -> bytes:
    """Bytes of base64 with padding. Spaces and line breaks, which encoders of mail and some shells write, are skipped.

    Raises ValueError for any other character, and for a wrong length.
    """
    return binascii.a2b_base64("".join(text.split()), strict_mode=True)
