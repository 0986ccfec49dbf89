"""Options of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag, check_integer
from penstock.errors import ConfigError

LORA_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """enable_lora: serve LoRA adapters (`lora_request`).
    max_loras: maximum number of different adapters in a step, each of which has a slot on the device.
    max_lora_rank: maximum rank of an adapter.
    max_cpu_loras: maximum number of adapters in host memory, at least max_loras; None takes max_loras.
    lora_dtype: dtype in which adapters are kept; "auto" takes the one in which the model computes.
    """

    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_flag("enable_lora", self.enable_lora)
        check_integer("max_loras", self.max_loras, 1)
        check_integer("max_lora_rank", self.max_lora_rank, 1)
        check_choice("lora_dtype", self.lora_dtype, LORA_DTYPES)
        if self.max_cpu_loras is None:
            return
        check_integer("max_cpu_loras", self.max_cpu_loras, 1)
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}. Allowed: at least as "
                "many, since each adapter on the device is in host memory too."
            )

    @property
    def num_on_host(self) -> int:
        """Maximum number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
