"""Hidden states of requests: the fields that ask for them, and their form in choices."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from penstock.engine.output.outputs import CompletionOutput
from penstock.features.hidden_states.messages import ALL, HiddenStates, HiddenStatesPart, parts_of_hidden_states
from penstock.server.protocol.base import GenerationFields

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def hidden_states_parts(request: GenerationFields) -> list[HiddenStatesPart]:
    """The part of a request for hidden states, or none. Raises InvalidParameter."""
    return parts_of_hidden_states(request.return_hidden_states, request.hidden_states_layers)


def hidden_states_field(completion: CompletionOutput, request: GenerationFields) -> dict[str, Any]:
    """Field of an answer that has ended, or none: the numbers of a token or of all; by layer if layers are named."""
    if not request.return_hidden_states or completion.finish_reason is None:
        return {}
    states = completion.hidden_states
    if states is None:  # it has ended before its first token
        return {"hidden_states": None}
    encode = _as_base64 if request.encoding_format == "base64" else _as_numbers
    has_all = request.return_hidden_states == ALL
    by_layer: Any = {str(layer): encode(states, number, has_all) for number, layer in enumerate(states)}
    if request.hidden_states_layers is None:
        (by_layer,) = by_layer.values()
    # As JSON here, where it may be in a thread.
    return {"hidden_states": msgspec.Raw(msgspec.json.encode(by_layer))}


async def beside_the_loop(
    request: GenerationFields, make: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """Make parts of a response: in a thread for a request with hidden states, whose numbers are many."""
    if not request.return_hidden_states:
        return make(*args, **kwargs)
    return await asyncio.to_thread(make, *args, **kwargs)


def _as_numbers(states: HiddenStates, number: int, has_all: bool) -> msgspec.Raw:
    # Row by row, since Python's numbers take several times as much as their text.
    rows = [msgspec.json.encode(row.tolist()) for row in states.numbers()[:, number]]
    return msgspec.Raw(b"[" + b",".join(rows) + b"]" if has_all else rows[-1])


def _as_base64(states: HiddenStates, number: int, has_all: bool) -> dict[str, Any]:
    rows = states.raw()[:, number]
    rows = np.ascontiguousarray(rows if has_all else rows[-1])
    return {"dtype": states.dtype, "shape": rows.shape, "data": base64.b64encode(rows.tobytes()).decode("ascii")}
