"""Options of the device: its kind, CPU threads, attention backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.config.checks import check_choice, check_integer
from penstock.config.flags import listed

DEVICES = ("auto", "cpu", "cuda")
MATMUL_PRECISIONS = ("highest", "high", "medium")
# OpenMP ends the process where it cannot start its threads.
_MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """device: "auto" takes CUDA if available, else the CPU.
    num_threads: CPU threads for the model; None takes one per physical core that this process may use.
    attention_backend: cpu_native, cpu_paged, triton_paged, triton_invariant, torch_varlen or reference; None takes the
        fastest that works.
    float32_matmul_precision: precision of a GPU's float32 matrix products, as `torch.set_float32_matmul_precision`:
        "high" and "medium" take tensor cores (TF32, bfloat16), which round the factors.
    """

    device: str = field(default="auto", metadata=listed(", ".join(DEVICES)))
    num_threads: int | None = field(
        default=None, metadata=listed("CPU threads  [default: one per physical core]", flag="--threads")
    )
    attention_backend: str | None = None
    float32_matmul_precision: str = "highest"

    def __post_init__(self) -> None:
        check_choice("device", self.device, DEVICES)
        check_choice("float32_matmul_precision", self.float32_matmul_precision, MATMUL_PRECISIONS)
        if self.num_threads is not None:
            check_integer("num_threads", self.num_threads, 1, _MOST_THREADS)
