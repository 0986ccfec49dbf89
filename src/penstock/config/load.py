"""Where weights come from."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """load_format: "auto" takes safetensors, else PyTorch `.bin` files; "dummy" takes random weights.
    use_tqdm_on_load: show a progress bar when standard error is a terminal.
    """

    load_format: str = "auto"
    use_tqdm_on_load: bool = True

    def __post_init__(self) -> None:
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_flag("use_tqdm_on_load", self.use_tqdm_on_load)
