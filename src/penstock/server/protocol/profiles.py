"""Body of the route that starts a profile."""

from __future__ import annotations

from penstock.server.protocol.base import StrictModel


class StartProfileRequest(StrictModel):
    """profile_prefix: begin of the traces' file names."""

    profile_prefix: str | None = None
