"""Options of CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.checks import check_choice, check_integer
from penstock.errors import ConfigError

FULL_DECODE_ONLY, NO_GRAPHS, FULL = "full_decode_only", "none", "full"
PIECEWISE, FULL_AND_PIECEWISE = "piecewise", "full_and_piecewise"
_MODES = (FULL_DECODE_ONLY, FULL_AND_PIECEWISE, FULL, PIECEWISE, NO_GRAPHS)
# Padded numbers of tokens of steps that mix prefills and decodes.
_TOKEN_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """cudagraph_mode: "full_decode_only" runs steps in which all requests have equally many tokens, decodes and the
        verification of drafts, as CUDA graphs on a GPU; "piecewise" runs steps of up to 512 tokens that mix
        prefills and decodes, or have uneven numbers of drafts, as graphs between which attention runs;
        "full_and_piecewise" does both; "full" runs mixed steps of up to 512 tokens as whole graphs too, for which the
        attention backend must be one that can be captured; "none" runs all steps without. Graphs of mixed steps were
        not run on a GPU yet.
    cudagraph_capture_sizes: padded numbers of requests that get a graph, and of tokens of mixed steps; None takes
        1, 2, 4, multiples of 8 to 256 and of 16 beyond, up to max_num_seqs, and ten numbers of tokens up to 512.
    max_cudagraph_capture_size: largest default size; larger steps run without a graph. None takes max_num_seqs.
    """

    cudagraph_mode: str = FULL_DECODE_ONLY
    cudagraph_capture_sizes: Sequence[int] | None = None
    max_cudagraph_capture_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.cudagraph_mode, str):
            object.__setattr__(self, "cudagraph_mode", self.cudagraph_mode.lower())
        check_choice("cudagraph_mode", self.cudagraph_mode, _MODES)
        if self.max_cudagraph_capture_size is not None:
            check_integer("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 1)
        if self.cudagraph_capture_sizes is None:
            return
        if not _is_sizes(self.cudagraph_capture_sizes):
            raise ConfigError(
                f"cudagraph_capture_sizes={self.cudagraph_capture_sizes!r} is not valid. Allowed: a list of integers "
                "of at least 1, such as [1, 2, 4, 8]; cudagraph_mode='none' for no graphs."
            )
        most, largest = self.max_cudagraph_capture_size, max(self.cudagraph_capture_sizes)
        if most is not None and most != largest:
            raise ConfigError(
                f"max_cudagraph_capture_size={most} is not valid with cudagraph_capture_sizes, whose largest is "
                f"{largest}. Leave one of them out."
            )

    def sizes(self, max_num_reqs: int) -> list[int]:
        """Padded numbers of requests of an engine that runs up to `max_num_reqs`, ascending."""
        if self.cudagraph_mode in (NO_GRAPHS, PIECEWISE):
            return []
        if self.cudagraph_capture_sizes is not None:
            return sorted({size for size in self.cudagraph_capture_sizes if size <= max_num_reqs})
        most = min(max_num_reqs, self.max_cudagraph_capture_size or max_num_reqs)
        sizes = [1, 2, 4, *range(8, 257, 8), *range(272, most + 1, 16), most]
        return sorted({size for size in sizes if size <= most})

    def token_sizes(self, max_num_tokens: int) -> list[int]:
        """Padded numbers of tokens of mixed steps, of an engine with steps of up to `max_num_tokens`, ascending."""
        if self.cudagraph_mode not in (PIECEWISE, FULL_AND_PIECEWISE, FULL):
            return []
        sizes = self.cudagraph_capture_sizes or _TOKEN_SIZES
        return sorted({size for size in sizes if size <= max_num_tokens})


def _is_sizes(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in value)
