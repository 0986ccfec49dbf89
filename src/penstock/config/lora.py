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
    lora_target_modules: ends of the names of the modules that adapters may change, such as ["q_proj", "v_proj"], or
        "q_proj,v_proj"; None for all.
    """

    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    lora_target_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_flag("enable_lora", self.enable_lora)
        check_integer("max_loras", self.max_loras, 1)
        check_integer("max_lora_rank", self.max_lora_rank, 1)
        check_choice("lora_dtype", self.lora_dtype, LORA_DTYPES)
        if self.lora_target_modules is not None:
            object.__setattr__(self, "lora_target_modules", _targets(self.lora_target_modules))
        if self.max_cpu_loras is None:
            return
        check_integer("max_cpu_loras", self.max_cpu_loras, 1)
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}. Allowed: at least as "
                "many, since each adapter on the device is in host memory too."
            )

    def may_change(self, module: str) -> bool:
        """Whether adapters may change the module of this name."""
        targets = self.lora_target_modules
        return targets is None or any(f".{module}".endswith(f".{target}") for target in targets)

    @property
    def num_on_host(self) -> int:
        """Maximum number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


def _targets(given: object) -> tuple[str, ...]:
    targets = given.split(",") if isinstance(given, str) else given
    if (
        not isinstance(targets, (list, tuple))
        or not targets
        or not all(isinstance(one, str) and one for one in targets)
    ):
        raise ConfigError(
            f"lora_target_modules={given!r} is not valid. Allowed: ends of names of modules, such as ['q_proj', "
            "'v_proj'], or None for all."
        )
    return tuple(targets)
