"""Schemas in xgrammar's notation of grammars, from the form that `xgrammar_schema` gives them.

xgrammar's own reading of schemas is not used: it passes over keywords, and lets through what is no JSON.
"""

from __future__ import annotations

import json
import math
from typing import Any

from penstock.structured.xgrammar_patterns import ESCAPED, PLAIN, as_json_rule, as_rule, quoted

_DIGIT = "[0-9]"
# Doubles are exact with so many, and read as they are written.
_FRACTION = f'("." {_DIGIT}{{1,6}})?'
_NUMBER = f'"-"? ("0" | [1-9] {_DIGIT}*) ("." {_DIGIT}+)? ([eE] [+\\-]? {_DIGIT}{{1,2}})?'
# Characters that are counted by a rule each. Masks are hundreds of times as fast as with a repetition, and compiling
# takes some milliseconds per rule.
_MOST_RULES = 128
_OR_NOTHING = ' | ""'
_BASIC = {
    "json_character": f"{PLAIN} | {ESCAPED}",
    # Of all ways to write it, xgrammar makes the masks of this one the fastest.
    "json_characters": f"{PLAIN}* ({ESCAPED} {PLAIN}*)*",
    "json_text": r'"\x22" json_characters "\x22"',
    "json_number": _NUMBER,
    "json_pair": 'json_text space ":" space json_value',
    "json_object": '"{" space (json_pair (space "," space json_pair)* space)? "}"',
    "json_array": '"[" space (json_value (space "," space json_value)* space)? "]"',
    "json_value": 'json_text | json_number | "true" | "false" | "null" | json_object | json_array',
}


def grammar_of(schema: Any, whitespace: str) -> str:
    """A schema with definitions, as a grammar whose first rule is `root`. whitespace: pattern of what may stand where
    JSON may have whitespace, or nothing does.
    """
    writer = _Writer()
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    for name, value in definitions.items():
        writer.rules[f"define_{name}"] = writer.value(value)
    rest = {name: value for name, value in schema.items() if name != "$defs"} if isinstance(schema, dict) else schema
    rules = {
        "root": writer.value(rest),
        **writer.rules,
        **writer.rests(),
        **_BASIC,
        "space": f'"" | ({as_rule(whitespace)})' if whitespace else '""',
    }
    return "\n".join(f"{name} ::= {body}" for name, body in rules.items())


class _Writer:
    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._longest = -1

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        name = f"rule_{len(self.rules)}"
        self.rules[name] = body
        return name

    def value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return "json_value"
        if "$ref" in schema:
            return f"define_{schema['$ref'].rpartition('/')[2]}"
        if "anyOf" in schema:
            return "(" + " | ".join(map(self.value, schema["anyOf"])) + ")"
        if "enum" in schema:
            (value,) = schema["enum"]
            is_whole = isinstance(value, float) and value.is_integer()
            return quoted(json.dumps(int(value) if is_whole else value, ensure_ascii=False))
        kind = schema["type"]
        if kind in ("null", "boolean"):
            return '"null"' if kind == "null" else '("true" | "false")'
        write = {
            "integer": self._integer,
            "number": _number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }[kind]
        return self.rule(write(schema))

    def _integer(self, schema: dict[str, Any]) -> str:
        if "multipleOf" not in schema:
            return " | ".join(_between(schema.get("minimum", -math.inf), schema.get("maximum", math.inf)))
        divisor = schema["multipleOf"]
        # A rule for each remainder of what is written so far.
        names = [f"rule_{len(self.rules)}_{remainder}" for remainder in range(divisor)]
        for remainder, name in enumerate(names):
            ways = [f'"{digit}" {names[(10 * remainder + digit) % divisor]}' for digit in range(10)]
            self.rules[name] = " | ".join([*ways, *([] if remainder else ['""'])])
        first = " | ".join(f'"{digit}" {names[digit % divisor]}' for digit in range(1, 10))
        return f'"-"? ("0" | {first})'

    def _string(self, schema: dict[str, Any]) -> str:
        if "pattern" in schema:
            return rf'"\x22" ({as_json_rule(schema["pattern"])}) "\x22"'
        least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        first = "json_character " * least if least <= _MOST_RULES else _repeated("json_character", least, least)
        if most == math.inf:
            return rf'"\x22" {first}json_characters "\x22"'
        if most - least > _MOST_RULES:
            return rf'"\x22" {first}{_repeated("json_character", 0, most - least)} "\x22"'
        self._longest = max(self._longest, most - least)
        return rf'"\x22" {first}json_rest_{most - least}'

    def rests(self) -> dict[str, str]:
        """By how many characters may still come, what is left of a text with its quote."""
        if self._longest < 0:
            return {}
        more = {
            f"json_rest_{count}": rf'"\x22" | {PLAIN} json_rest_{count - 1} | {ESCAPED} json_rest_{count - 1}'
            for count in range(1, self._longest + 1)
        }
        return {"json_rest_0": r'"\x22"', **more}

    def _array(self, schema: dict[str, Any]) -> str:
        first = [self.value(item) for item in schema.get("prefixItems", ())]
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        rest = "" if schema["items"] is False else self.value(schema["items"])
        # Written from the last one on: each is what comes where so many items have come.
        follow = "space"
        if rest:
            # The first of all has no comma.
            num_before = max(1, len(first))
            follow = _repeated(f'space "," space {rest}', max(0, least - num_before), most - num_before) + "space"
            if not first:
                follow = f"{rest} {follow}"
        for index in range(len(first) - 1, -1, -1):
            comma = 'space "," space ' if index else ""
            alone = " | space" if least <= index + 1 < len(first) else ""
            follow = self.rule(f"{comma}{first[index]} ({follow}{alone})")
        if not first and not rest:
            return '"[" space "]"'
        return f'"[" space ({follow}{_OR_NOTHING if least == 0 else ""}) "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        if "properties" in schema:
            return self._listed(schema["properties"], set(schema.get("required", ())), least, most)
        if "patternProperties" in schema:
            ((pattern, value),) = schema["patternProperties"].items()
            name = rf'"\x22" ({as_json_rule(pattern)}) "\x22"'
        else:
            name, value = "json_text", schema["additionalProperties"]
        pair = self.rule(f'{name} space ":" space {self.value(value)}')
        if most == 0:
            return '"{" space "}"'
        more = _repeated(f'space "," space {pair}', max(0, least - 1), most - 1)
        return f'"{{" space ({pair} {more}space{_OR_NOTHING if least == 0 else ""}) "}}"'

    def _listed(self, properties: dict[str, Any], required: set[str], least: int, most: float) -> str:
        """An object of these properties in their order."""
        pairs = [
            (self.rule(f'{quoted(json.dumps(name, ensure_ascii=False))} space ":" space {self.value(item)}'), name)
            for name, item in properties.items()
        ]
        # More than so many need not be told apart. Rules by how many properties there are before, from the last on.
        counted = int(most) if most < math.inf else max(least, 1)
        follow = [("space" if count else '""') if count >= least else "" for count in range(counted + 1)]
        for pair, name in reversed(pairs):
            before = follow
            follow = []
            for count in range(counted + 1):
                after = before[min(count + 1, counted)] if count < most else ""
                comma = 'space "," space ' if count else ""
                ways = [f"{comma}{pair} {after}"] if after else []
                if name not in required and before[count]:
                    ways.append(before[count])
                follow.append(self.rule(" | ".join(ways)) if ways else "")
        return f'"{{" space ({follow[0]}) "}}"'


def _repeated(body: str, least: int, most: float) -> str:
    """A text so many times; nothing where it may not come."""
    if most == 0:
        return ""
    if most == math.inf and least < 2:
        # Masks of braces are hundreds of times as slow.
        return f"({body}){'*+'[least]} "
    return f"({body}){{{least},{'' if most == math.inf else int(most)}}} "


def _number(schema: dict[str, Any]) -> str:
    """Between two whole numbers: any fraction behind a whole number but the last, and the bounds themselves."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    if low == -math.inf and high == math.inf:
        return "json_number"
    ways = []
    if high > 0:
        ways += _fractions(max(0, low), high, is_open="exclusiveMinimum" in schema and low >= 0)
    if low < 0:
        below = _fractions(max(0, -high), -low, is_open="exclusiveMaximum" in schema and high <= 0)
        ways += [f'"-" {way}' for way in below]
    return " | ".join([*ways, *(quoted(str(int(schema[name]))) for name in ("minimum", "maximum") if name in schema)])


def _fractions(low: float, high: float, *, is_open: bool) -> list[str]:
    """Numbers of at least 0 from a whole number, which is not among them if it is open, up to and without another."""
    if low >= high:
        return []
    first = int(low) + is_open
    ways = [f"({way}) {_FRACTION}" for way in _whole(first, high - 1)]
    return [*ways, f'{quoted(str(int(low)))} "." {_DIGIT}{{0,5}} [1-9]'] if is_open else ways


def _between(low: float, high: float) -> list[str]:
    """The whole numbers from one to another, either of which may be infinite."""
    ways = _whole(max(0, low), high) if high >= 0 else []
    return ways + [f'"-" ({way})' for way in (_whole(max(1, -high), -low) if low < 0 else [])]


def _whole(low: float, high: float) -> list[str]:
    """Those of at least 0."""
    if low > high:
        return []
    ways: list[str] = []
    first = int(low)
    while first <= high:
        last = 10 ** len(str(first)) - 1
        if high == math.inf and first == 10 ** (len(str(first)) - 1):
            return [*ways, f"[1-9] {_DIGIT}{{{len(str(first)) - 1},}}"]
        ways.append(_same_length(str(first), str(int(min(last, high)))))
        first = last + 1
    return ways


def _same_length(low: str, high: str) -> str:
    """Numbers of as many digits, of which some may be zeros at the begin."""
    if low == high:
        return quoted(low)
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return f"[{low[0]}-{high[0]}]" + (f" {_DIGIT}{{{rest},{rest}}}" if rest else "")
    if low[0] == high[0]:
        return f"{quoted(low[0])} ({_same_length(low[1:], high[1:])})"
    ways = [
        f"{quoted(low[0])} ({_same_length(low[1:], '9' * rest)})",
        f"{quoted(high[0])} ({_same_length('0' * rest, high[1:])})",
    ]
    if int(high[0]) - int(low[0]) > 1:
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] {_DIGIT}{{{rest},{rest}}}")
    return "(" + " | ".join(ways) + ")"
