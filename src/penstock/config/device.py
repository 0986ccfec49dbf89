"""Options of the device: its kind, CPU threads, attention backend."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_integer

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """device: "auto" takes CUDA if available, else the CPU.
    num_threads: CPU threads for the model; None takes one per physical core that this process may use.
    attention_backend: cpu_native, cpu_paged, triton_paged, torch_varlen or reference; None takes the fastest that
        works.
    """

    device: str = "auto"
    num_threads: int | None = None
    attention_backend: str | None = None

    def __post_init__(self) -> None:
        check_choice("device", self.device, DEVICES)
        if self.num_threads is not None:
            check_integer("num_threads", self.num_threads, 1)
