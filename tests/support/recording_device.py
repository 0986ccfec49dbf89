"""A CPU device that captures graphs: a replay reruns the captured calls on the same tensors.

As in a graph of a GPU, addresses are all that stays of the inputs. The first run of a capture notes the storages that
torch's operators read and that were not made within. From then on the captured calls own none of the step's tensors,
and a replay is refused if one of these storages is gone or has moved. C++ kernels are not seen.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.device.cpu import CpuDevice
from penstock.step.frame import Frame

Between = Callable[[Callable[[], object]], None]


class RecordingDevice(CpuDevice):
    """num_captures, num_replays: counts. num_cuts: calls between the pieces of the last capture. refusals: error texts
    of replays that read tensors which are not persistent. refuses: error text of every capture.
    """

    captures_graphs = True

    def __init__(self, refuses: str | None = None) -> None:
        super().__init__(1)
        self.num_captures = 0
        self.num_replays = 0
        self.num_cuts = 0
        self.refusals: list[str] = []
        self._refuses = refuses

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._record(work, lambda _: ())

    def capture_pieces(self, work: Callable[[Between], None]) -> Callable[[], None]:
        """Calls between pieces do not run during the capture."""
        replay = self._record(work, lambda reads: (reads.leave_out,))
        self.num_cuts = 0

        def cut(call: Callable[[], object]) -> None:
            self.num_cuts += 1

        work(cut)
        return replay

    def _record(self, work: Callable[..., None], arguments: Callable[[_Reads], Sequence[Any]]) -> Callable[[], None]:
        if self._refuses is not None:
            raise RuntimeError(self._refuses)
        self.num_captures += 1
        recorded = _Recorded(work, arguments)

        def replay() -> None:
            self.num_replays += 1
            try:
                recorded.run()
            except AssertionError as error:
                self.refusals.append(str(error))
                raise

        return replay


class _Recorded:
    """Captured work. arguments: of the work, for the notes of a run."""

    def __init__(self, work: Callable[..., None], arguments: Callable[[_Reads], Sequence[Any]]) -> None:
        self._work = work
        self._arguments = arguments
        self._inputs: list[_Input] | None = None

    def run(self) -> None:
        """Run the work. Raises AssertionError if a tensor that the first run has read is not there any more."""
        reads = _Reads()
        if self._inputs is not None:
            for one in self._inputs:
                one.check()
            self._work(*self._arguments(reads))
            return
        with reads:
            self._work(*self._arguments(reads))
        self._inputs = reads.inputs()
        self._work = _without_ownership(self._work)


class _Input(NamedTuple):
    """A storage that captured work reads, by the first operator that did."""

    storage: weakref.ref[torch.UntypedStorage]
    address: int
    operator: str
    shape: tuple[int, ...]

    def check(self) -> None:
        storage = self.storage()
        is_there = storage is not None and storage.data_ptr() == self.address
        why = "freed" if storage is None else "elsewhere"
        assert is_there, f"{self.operator} reads a tensor of shape {list(self.shape)} whose memory is {why} by now"


class _Reads(TorchDispatchMode):
    """Dispatch mode that notes the storages of operators' arguments, but of those that an operator has made."""

    def __init__(self) -> None:
        super().__init__()
        # All storages stay alive until the end of the run, so that none takes the place of another one.
        self._made: dict[int, torch.UntypedStorage] = {}
        self._read: dict[int, tuple[torch.UntypedStorage, str, tuple[int, ...]]] = {}
        self._is_left_out = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in `TensorMemory`."""
        return False

    def leave_out(self, call: Callable[[], object]) -> None:
        """Run a call that is no part of the graph."""
        self._is_left_out = True
        call()
        self._is_left_out = False

    def inputs(self) -> list[_Input]:
        return [
            _Input(weakref.ref(storage), storage.data_ptr(), operator, shape)
            for storage, operator, shape in self._read.values()
        ]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given: Mapping[str, Any] = kwargs or {}
        if self._is_left_out:
            return func(*args, **given)
        for tensor in _tensors((args, given)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self._read.setdefault(storage._cdata, (storage, str(func), tuple(tensor.shape)))
        result = func(*args, **given)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._read:
                self._made[storage._cdata] = storage
        return result


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]


def _without_ownership(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function; tensors and frames that it is bound to become ones on the same memory, which they do not own."""
    if isinstance(function, partial):
        return partial(_without_ownership(function.func), *map(_of_closure, function.args))
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(CellType(_of_closure(cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)


def _of_closure(value: Any) -> Any:
    if isinstance(value, (FunctionType, partial)):
        return _without_ownership(value)
    if isinstance(value, Frame):
        frame = Frame(value.output, value.model)
        frame.wants, frame.inputs, frame.context = value.wants, _borrowed(value.inputs), _borrowed(value.context)
        return frame
    return _borrowed(value) if isinstance(value, Tensor) else value


def _borrowed(value: Any) -> Any:
    """Copy plain containers down to their tensors, of which only the addresses stay."""
    if isinstance(value, Tensor):
        return _on_same_memory(value)
    if isinstance(value, Mapping):
        return {key: _borrowed(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_borrowed, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_borrowed, value))
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, _borrowed(getattr(value, field.name)))
        return made
    return value


def _on_same_memory(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty_like(tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
