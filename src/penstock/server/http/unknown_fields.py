"""Fields that a route does not have, at the top level of a request's body: refused, or left out of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from penstock.contract.param_checks import shown
from penstock.server.protocol.other_fields import HARMLESS_FIELDS

logger = logging.getLogger(__name__)
# Names that are remembered: a client may send a new one in each request.
_MOST_LOGGED = 200


class UnknownFields:
    """Policy for unknown fields, as in `ServerOptions.unknown_fields`.

    Harmless fields of other clients are left out by every policy. A field that is left out is logged once, other than
    by "ignore".
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._logged: set[str] = set()

    def without(self, body: dict[str, Any], request: type[BaseModel]) -> dict[str, Any]:
        """The body without unknown fields that are left out; those that the request's model refuses stay.

        request: model of the route's requests.
        """
        others: Mapping[str, Any] = getattr(request, "other_fields", {})
        unknown = [name for name in body if name not in request.model_fields and name not in others]
        if self._policy == "refuse":
            unknown = [name for name in unknown if name in HARMLESS_FIELDS]
        if not unknown:
            return body
        for name in unknown:
            self._log(name)
        left_out = set(unknown)
        return {name: value for name, value in body.items() if name not in left_out}

    def _log(self, name: str) -> None:
        if self._policy == "ignore" or name in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(name)
        if name in HARMLESS_FIELDS:
            logger.info("The field %s of requests changes nothing here, and is ignored.", name)
        else:
            logger.warning(
                "There is no field %s; requests have it, and it is ignored (unknown_fields=warn).", shown(name)
            )
        if len(self._logged) == _MOST_LOGGED:
            logger.warning("Requests have %d unknown fields; further ones are not logged.", _MOST_LOGGED)
