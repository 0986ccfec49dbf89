"""Schemas of the enforced string formats.

A validator may treat format as an annotation. Here it is enforced, so that an output is valid either way.
"""

from __future__ import annotations

from typing import Any

from penstock.structured.patterns import translate_search
from penstock.structured.schema_constants import LARGEST_INTEGER

# Years are 0001 to 9999: some libraries know no year 0.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_YEAR = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR, _MINUTE, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
# Leap seconds at midnight UTC only, not in other time zones.
_TIME = (
    f"(?:{_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}(?:[Zz]|[+-]{_HOUR}:{_MINUTE})|23:59:60{_FRACTION}(?:[Zz]|[+-]00:00))"
)
# Without labels whose third and fourth characters are hyphens: internationalised names have rules of their own.
_LABEL = (
    "[0-9A-Za-z](?:[0-9A-Za-z]"
    "|[0-9A-Za-z-][0-9A-Za-z](?:[0-9A-Za-z-]{0,59}[0-9A-Za-z])?"
    "|[0-9A-Za-z-]-[0-9A-Za-z](?:[0-9A-Za-z-]{0,58}[0-9A-Za-z])?)?"
)
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"
_BASE64 = "[A-Za-z0-9+/]"
_BYTES = f"(?:{_BASE64}{{4}})*(?:{_BASE64}{{2}}[AEIMQUYcgkosw048]=|{_BASE64}[AQgw]==)?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
# RFC 3986, section 3.2.2: eight groups, of which zeros may be left out once, and the last two may be an IPv4 address.
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST}",
        f"::(?:{_GROUP}:){{5}}{_LAST}",
        *(f"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?::(?:{_GROUP}:){{{4 - before}}}{_LAST}" for before in range(5)),
        f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
    ]
)
_HEX = "[0-9A-Fa-f]"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": translate_search(f"^{_DATE}$")},
    "time": {"pattern": translate_search(f"^{_TIME}$")},
    "date-time": {"pattern": translate_search(f"^{_DATE}[Tt]{_TIME}$")},
    "hostname": {"pattern": translate_search(f"^{_HOSTNAME}$"), "maxLength": 253},
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    **{name: {"minimum": -LARGEST_INTEGER, "maximum": LARGEST_INTEGER} for name in ("int64", "float", "double")},
    "byte": {"pattern": translate_search(f"^{_BYTES}$")},
    "ipv4": {"pattern": translate_search(f"^{_IPV4}$")},
    "ipv6": {"pattern": translate_search(f"^(?:{_IPV6})$")},
    "json-pointer": {"pattern": translate_search(f"^{_POINTER}$")},
    "relative-json-pointer": {"pattern": translate_search(f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$")},
    "uuid": {"pattern": translate_search(f"^{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$")},
    # Formats that llguidance enforces itself.
    **{name: {"format": name} for name in ("duration", "email", "uri")},
}
