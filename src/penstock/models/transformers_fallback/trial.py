"""Trial run on the meta device, which records the model's attention calls and checks that they can be paged.

Suffixes: T tokens, H query heads, K KV heads, D head size, V vocabulary, _1… a batch of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.attention import LayerAttention
from penstock.models.transformers_fallback.interface import CannotRun, mask_function_of, recording

# (batch, head, query position, key position) -> whether the key is visible.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def read_window(mask_function: Any, longest_context: int) -> int | None:
    """Return the sliding window of a mask function, the current position included; None for a causal mask.

    Found by evaluating the function. Raises CannotRun for any other mask.
    """
    last = longest_context - 1
    try:
        seen = _seen_keys(mask_function, last, longest_context).nonzero().flatten()
        first_seen = int(seen[0]) if len(seen) else last
        window = None if first_seen == 0 else longest_context - first_seen
        for query in _telling_positions(window, longest_context):
            num_keys = min(query + 8, longest_context)
            keys = torch.arange(num_keys, device="cpu")
            expected = keys <= query if window is None else (keys <= query) & (keys > query - window)
            if not torch.equal(_seen_keys(mask_function, query, num_keys), expected):
                raise CannotRun(
                    "a layer's mask is neither causal nor causal with a sliding window "
                    f"(at position {query} it sees other positions)"
                )
    except CannotRun:
        raise
    except Exception as error:
        raise CannotRun(f"a layer's mask depends on more than the positions ({error})") from error
    return window


def _telling_positions(window: int | None, longest_context: int) -> list[int]:
    around = [0, 1, 2, 5, 33, longest_context // 2, longest_context - 1]
    if window is not None:
        around += [window - 1, window, window + 1, 2 * window + 1]
    return sorted({position for position in around if position < longest_context})


def _seen_keys(mask_function: MaskFunction, query: int, num_keys: int) -> Tensor:
    """Visible keys of a query, bool [num_keys]."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    keys = torch.arange(num_keys, device="cpu")
    seen = mask_function(zero, zero, torch.full_like(keys, query), keys)
    return torch.as_tensor(seen, dtype=torch.bool, device="cpu").expand(num_keys)


_NUM_TOKENS = 3
# Supported arguments of an attention call, and those without effect in a causal layer without dropout.
_UNDERSTOOD = (
    "scaling",
    "sliding_window",
    "softcap",
    "s_aux",
    "alibi_slopes",
    "attention_mask",
    "dropout",
    "is_causal",
)
_IRRELEVANT = ("position_ids", "cache_position", "layer_idx", "use_cache")
_MEANINGS = {"position_bias": "a bias that depends on positions"}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Call of the attention interface by a module."""

    module: nn.Module
    query_shape: torch.Size
    key_shape: torch.Size
    value_shape: torch.Size
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SubmoduleCall:
    """A submodule called by the model itself. arguments: by parameter. num_attention_calls: calls inside it."""

    name: str
    arguments: Mapping[str, Any]
    output: Any
    num_attention_calls: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """backbone: name of the submodule that turns tokens into hidden states. output_type: type of its output.
    hidden_size, vocab_size: widths of hidden states and logits. takes_positions: whether the backbone has an argument
    for positions.
    layers: attention modules in execution order, and the parameters of each.
    """

    backbone: str
    output_type: type
    hidden_size: int
    vocab_size: int
    takes_positions: bool
    layers: tuple[tuple[nn.Module, LayerAttention], ...]


@dataclass
class _Recorder:
    attention_calls: list[AttentionCall] = field(default_factory=list)
    submodule_calls: list[SubmoduleCall] = field(default_factory=list)

    def record(
        self, module: nn.Module, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        shapes = (query_1HTD.shape, key_1KTD.shape, value_1KTD.shape)
        if any(len(shape) != 4 for shape in shapes):
            raise CannotRun(f"a layer's queries, keys and values have the shapes {', '.join(map(str, shapes))}")
        self.attention_calls.append(AttentionCall(module, *shapes, arguments))
        batch_size, num_heads, num_tokens, _ = query_1HTD.shape
        return query_1HTD.new_empty(batch_size, num_tokens, num_heads, value_1KTD.shape[-1])


def run_trial(model: PreTrainedModel, longest_context: int) -> TrialResult:
    """Run a causal language model of Transformers, whose parameters are on the meta device, on a few tokens.

    Its attention implementation must be TRIAL. Raises CannotRun for any attention that paged attention does not
    support.
    """
    recorder = _Recorder()
    with (
        torch.device("meta"),
        torch.no_grad(),
        recording(model, recorder.record),
        _watching_submodules(model, recorder),
        _experts_of_fixed_shapes(model),
    ):
        input_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        position_ids = torch.arange(_NUM_TOKENS).unsqueeze(0)
        try:
            # A mask of ones spares a check of positions, which meta tensors do not have.
            output = model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=torch.ones(1, _NUM_TOKENS, dtype=torch.int64),
                use_cache=False,
            )
        except CannotRun:
            raise
        except NotImplementedError as error:
            raise CannotRun(
                "its code decides what to compute by values that it reads on the host, which a run without weights "
                "does not have"
            ) from error
        except Exception as error:
            raise CannotRun(
                f"a trial run without weights failed ({type(error).__name__}: {_first_line(error)})"
            ) from error
    if getattr(output, "logits", None) is None:
        raise CannotRun("it returns no logits")
    backbone = _find_backbone(model, recorder, input_ids, position_ids)
    return TrialResult(
        backbone=backbone.name,
        output_type=type(backbone.output),
        hidden_size=backbone.output[0].shape[-1],
        vocab_size=output.logits.shape[-1],
        takes_positions=_takes_positions(model.get_submodule(backbone.name)),
        layers=_read_layers(model, recorder, longest_context),
    )


def _takes_positions(backbone: nn.Module) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters


def _find_backbone(
    model: PreTrainedModel, recorder: _Recorder, input_ids: Tensor, position_ids: Tensor
) -> SubmoduleCall:
    if not recorder.attention_calls:
        raise CannotRun("its attention does not go through the attention interface of Transformers")
    first = recorder.submodule_calls[0] if recorder.submodule_calls else None
    if first is None or first.num_attention_calls != len(recorder.attention_calls):
        raise CannotRun("its layers do not all run inside the first module that it calls")
    given_to = {"input_ids": input_ids, "position_ids": position_ids}
    has_alibi = all(call.arguments.get("alibi_slopes") is not None for call in recorder.attention_calls)
    if has_alibi and not _takes_positions(model.get_submodule(first.name)):
        del given_to["position_ids"]
    for name, given in given_to.items():
        if first.arguments.get(name) is not given:
            raise CannotRun(f"{first.name} does not get the {name} as they are")
    return first


def _read_layers(
    model: nn.Module, recorder: _Recorder, longest_context: int
) -> tuple[tuple[nn.Module, LayerAttention], ...]:
    names = {module: name for name, module in model.named_modules()}
    windows: dict[int, int | None] = {}
    layers: list[tuple[nn.Module, LayerAttention]] = []
    for call in recorder.attention_calls:
        name = names[call.module]
        if any(module is call.module for module, _ in layers):
            raise CannotRun(f"{name} computes attention more than once, so its keys and values cannot be told apart")
        mask = call.arguments.get("attention_mask")
        if id(mask) not in windows:
            windows[id(mask)] = _window_of_mask(mask, longest_context)
        layers.append((call.module, _read_layer(name, call, windows[id(mask)], longest_context)))
    return tuple(layers)


def _read_layer(name: str, call: AttentionCall, mask_window: int | None, longest_context: int) -> LayerAttention:
    _, num_heads, num_tokens, head_size = call.query_shape
    _, num_kv_heads, num_keys, _ = call.key_shape
    if num_tokens != _NUM_TOKENS or num_keys != num_tokens:
        raise CannotRun(f"{name} attends from {num_tokens} over {num_keys} positions in a run of {_NUM_TOKENS} tokens")
    if call.value_shape[:-1] != call.key_shape[:-1] or call.key_shape[-1] != head_size:
        shapes = f"queries {head_size}, keys {list(call.key_shape)}, values {list(call.value_shape)}"
        raise CannotRun(f"the queries, keys and values of {name} do not fit each other ({shapes})")
    if num_heads % num_kv_heads != 0:
        raise CannotRun(f"{name} has {num_heads} query heads, which {num_kv_heads} KV heads do not divide")
    _refuse_unknown_arguments(name, call)
    scale, soft_cap = call.arguments.get("scaling"), call.arguments.get("softcap")
    if not isinstance(scale, (int, float, NoneType)) or not isinstance(soft_cap, (int, float, NoneType)):
        raise CannotRun(f"the scale or the soft cap of {name} is computed as it runs")
    return LayerAttention(
        name=name,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=max(head_size, call.value_shape[-1]),
        scale=head_size**-0.5 if scale is None else float(scale),
        sliding_window=_agreed_window(name, call, mask_window, longest_context),
        soft_cap=soft_cap or None,
        sinks=_read_sinks(name, call),
        alibi_slopes=call.arguments.get("alibi_slopes"),
    )


@dataclass(frozen=True, slots=True)
class ParameterSinks:
    """`AttentionSinks` that are a parameter of an attention module."""

    module: nn.Module
    parameter: str

    @property
    def sinks(self) -> Tensor:
        return self.module.get_parameter(self.parameter)


def _read_sinks(name: str, call: AttentionCall) -> ParameterSinks | None:
    """Return the attention sinks of a call, which must be a parameter of its module as it is."""
    given = call.arguments.get("s_aux")
    if given is None:
        return None
    for parameter, value in call.module.named_parameters(recurse=False):
        if value is given and value.shape == call.query_shape[1:2]:
            return ParameterSinks(call.module, parameter)
    raise CannotRun(f"the attention sinks (s_aux) of {name} are computed as it runs")


def _agreed_window(name: str, call: AttentionCall, mask_window: int | None, longest_context: int) -> int | None:
    """Return the window of the mask or of the argument, which must agree if both are given."""
    argument = call.arguments.get("sliding_window")
    if argument is not None and argument >= longest_context:
        argument = None
    has_mask = call.arguments.get("attention_mask") is not None
    if has_mask and argument is not None and argument != mask_window:
        raise CannotRun(f"{name} has sliding_window={argument}, but its mask has {mask_window}")
    window: int | None = mask_window if has_mask else argument
    return window


def _window_of_mask(mask: Any, longest_context: int) -> int | None:
    if mask is None:
        return None
    mask_function = mask_function_of(mask)
    if mask_function is None:
        raise CannotRun("it makes or changes attention masks by itself")
    return read_window(mask_function, longest_context)


def _refuse_unknown_arguments(name: str, call: AttentionCall) -> None:
    if call.arguments.get("is_causal", getattr(call.module, "is_causal", True)) is False:
        raise CannotRun(f"{name} is not causal")
    if call.arguments.get("dropout"):
        raise CannotRun(f"{name} drops out attention weights")
    for argument, value in call.arguments.items():
        if argument in _UNDERSTOOD or argument in _IRRELEVANT or value is None or value is False:
            continue
        what = f"{_MEANINGS[argument]} ({argument})" if argument in _MEANINGS else f"the argument {argument}"
        raise CannotRun(f"{name} passes {what} to its attention, which is not supported here")


@contextmanager
def _watching_submodules(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Record the submodules that the model itself calls, not nested calls."""
    depth, attention_calls_before = 0, 0

    def enter(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        nonlocal depth, attention_calls_before
        if depth == 0:
            attention_calls_before = len(recorder.attention_calls)
        depth += 1

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            num_attention_calls = len(recorder.attention_calls) - attention_calls_before
            # Positional arguments are the first parameters.
            arguments = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
            recorder.submodule_calls.append(SubmoduleCall(names[module], arguments, output, num_attention_calls))

    names = {module: name for name, module in model.named_modules() if name}
    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _experts_of_fixed_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Compute experts in a way whose shapes do not depend on the routing, for a run without values."""
    can_set = getattr(model, "_can_set_experts_implementation", None)
    if can_set is None or not can_set():
        yield
        return
    chosen = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
