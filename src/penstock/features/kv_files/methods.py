"""Methods of `LLM` for prompts whose KV cache an application keeps or ships."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.contract import RpcCall, SamplingParams
from penstock.errors import ConfigError


class PrefixMethods(ABC):
    """Methods of an offline engine with `kv_offload_dir`."""

    @abstractmethod
    def _call_workers(self, call: RpcCall) -> list[Any]:
        """Answers of the feature."""

    @abstractmethod
    def _run_prompt(self, prompt: Any, params: SamplingParams) -> list[int]:
        """Run one prompt; return its token ids."""

    @property
    @abstractmethod
    def _kv_folder(self) -> Path | None:
        """Folder of the blocks."""

    def save_prefix(self, prompt: Any, archive: str | Path | None = None) -> int:
        """Compute a prompt and keep its KV cache; return the tokens that prompts which begin with it need not compute.

        prompt: as of `generate`: a text, or its token ids. Whole blocks of tokens are kept, so later prompts must have
            the tokens of this one up to the end of the last whole block.
        archive: file to write too, which `load_prefix` and `penstock cache import` read; None for none.

        Raises InvalidRequest for an engine without `kv_offload_dir`, ConfigError for an archive that is there.
        """
        from penstock.features.kv_files.folder import export_files

        if archive is not None and Path(archive).exists():
            raise ConfigError(f"{archive} is there already. Name another file.")
        self._call_workers(RpcCall("save_kv_prefix", ([],)))  # refuses an engine without a folder before it computes
        token_ids = self._run_prompt(prompt, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
        answers: Sequence[tuple[int, list[str]]] = self._call_workers(RpcCall("save_kv_prefix", (token_ids,)))
        if archive is not None:
            paths = dict.fromkeys(Path(path) for _, paths in answers for path in paths)
            assert self._kv_folder is not None
            export_files(self._kv_folder, paths, Path(archive))
        return max(num_tokens for num_tokens, _ in answers)

    def load_prefix(self, archive: str | Path) -> int:
        """Add the blocks of an archive of `save_prefix` to `kv_offload_dir`; return their number.

        Engines of another model, of other options or kernels do not find them. Raises ConfigError for another file.
        """
        from penstock.features.kv_files.folder import import_blocks

        self._call_workers(RpcCall("save_kv_prefix", ([],)))
        assert self._kv_folder is not None
        return import_blocks(self._kv_folder, Path(archive))
