"""llama.cpp through llama-cpp-python's low-level API: the loop of its server, requests in parallel sequences.

A prefix that all prompts share is computed once and given to every sequence, as llama.cpp's own examples do.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.peers.drivers.protocol import serve

_BATCH_TOKENS = 2048
# A shorter one is not worth a step of its own.
_SHORTEST_PREFIX = 32


@dataclass
class _Sequence:
    """position: tokens in the cache. wanted: tokens to generate."""

    prompt: list[int]
    wanted: int
    position: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.output) == self.wanted

    def next_tokens(self) -> list[int]:
        return self.prompt[self.position :] if not self.output else self.output[-1:]


class LlamaCpp:
    def __init__(self, model: str, threads: int, kv_tokens: int, kv_bytes: int, max_sequences: int = 32) -> None:
        llama_cpp.llama_backend_init()
        path = (model if model.endswith(".gguf") else os.path.join(model, "model.gguf")).encode()
        self._model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path.decode()}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = kv_tokens
        params.n_batch = _BATCH_TOKENS
        params.n_seq_max = max_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._max_sequences = max_sequences

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        if len(prompts) > self._max_sequences:
            raise ValueError(f"{len(prompts)} prompts, at most {self._max_sequences} sequences")
        llama_cpp.llama_memory_clear(self._memory, False)
        sequences = [_Sequence(*pair) for pair in zip(prompts, num_outputs, strict=True)]
        self._share_prefix(sequences)
        while any(not sequence.is_finished for sequence in sequences):
            self._step(sequences)
        return [sequence.output for sequence in sequences]

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, special tokens in them included, without any around them."""
        rows = []
        for text in texts:
            data = text.encode()
            ids = (llama_cpp.llama_token * (len(data) + 8))()
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, True)
            rows.append(list(ids[:count]))
        return rows

    def logprobs(self, windows: list[list[int]]) -> list[float]:
        """Log-probability of every token but the first of each window, which has at most a batch's tokens."""
        found: list[float] = []
        for window in windows:
            llama_cpp.llama_memory_clear(self._memory, False)
            self._batch.n_tokens = 0
            for position, token in enumerate(window):
                self._add(token, position, 0, wants_logits=True)
            self._decode()
            for row, token in enumerate(window[1:]):
                logits = np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(self._context, row), (self._num_vocab,)
                ).astype(np.float64)
                logits -= logits.max()
                found.append(float(logits[token] - np.log(np.exp(logits).sum())))
        return found

    @property
    def num_vocab(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(self._num_vocab)

    def compute(self, prompt: list[int], first: int, *, wants_logits: bool = True) -> None:
        """Compute a prompt's tokens from `first` on as sequence 0. wants_logits: of the last one."""
        for begin in range(first, len(prompt), _BATCH_TOKENS):
            self._batch.n_tokens = 0
            for position in range(begin, min(begin + _BATCH_TOKENS, len(prompt))):
                self._add(prompt[position], position, 0, wants_logits=wants_logits and position == len(prompt) - 1)
            self._decode()

    def save(self, path: Path, prompt: list[int]) -> None:
        """Write sequence 0 to a slot file, and forget it."""
        tokens = (llama_cpp.llama_token * len(prompt))(*prompt)
        if not llama_cpp.llama_state_seq_save_file(self._context, str(path).encode(), 0, tokens, len(prompt)):
            raise RuntimeError(f"llama.cpp cannot write {path}")
        llama_cpp.llama_memory_clear(self._memory, False)

    def restore(self, path: Path, num_tokens: int) -> None:
        """Read sequence 0 from a slot file, without its last token, which is computed again for its logits."""
        llama_cpp.llama_memory_clear(self._memory, False)
        tokens, count = (llama_cpp.llama_token * num_tokens)(), ctypes.c_size_t(0)
        if not llama_cpp.llama_state_seq_load_file(
            self._context, str(path).encode(), 0, tokens, num_tokens, ctypes.byref(count)
        ):
            raise RuntimeError(f"llama.cpp cannot read {path}")
        llama_cpp.llama_memory_seq_rm(self._memory, 0, num_tokens - 1, -1)

    def _share_prefix(self, sequences: list[_Sequence]) -> None:
        prefix = _common_prefix([sequence.prompt[:-1] for sequence in sequences])
        if len(sequences) < 2 or len(prefix) < _SHORTEST_PREFIX:
            return
        self.compute(prefix, 0, wants_logits=False)
        for index, sequence in enumerate(sequences):
            if index > 0:
                llama_cpp.llama_memory_seq_cp(self._memory, 0, index, 0, len(prefix))
            sequence.position = len(prefix)

    def _step(self, sequences: list[_Sequence]) -> None:
        """One batch: every running sequence's next token, and as much of the prompts as fits."""
        self._batch.n_tokens = 0
        rows: list[tuple[int, _Sequence]] = []
        running = [(index, sequence) for index, sequence in enumerate(sequences) if not sequence.is_finished]
        for index, sequence in sorted(running, key=lambda item: not item[1].output):
            tokens = sequence.next_tokens()[: _BATCH_TOKENS - self._batch.n_tokens]
            for token in tokens:
                position = sequence.position
                is_last = bool(sequence.output) or position == len(sequence.prompt) - 1
                if is_last:
                    rows.append((self._batch.n_tokens, sequence))
                self._add(token, position, index, wants_logits=is_last)
                sequence.position += 1
        self._decode()
        for row, sequence in rows:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            sequence.output.append(int(np.argmax(np.ctypeslib.as_array(logits, (self._num_vocab,)))))
        for index, sequence in running:
            if sequence.is_finished:
                llama_cpp.llama_memory_seq_rm(self._memory, index, -1, -1)

    def _add(self, token: int, position: int, sequence: int, *, wants_logits: bool) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = wants_logits
        batch.n_tokens += 1

    def _decode(self) -> None:
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")


def _common_prefix(rows: list[list[int]]) -> list[int]:
    smallest, largest = min(rows), max(rows)
    length = 0
    while length < min(len(smallest), len(largest)) and smallest[length] == largest[length]:
        length += 1
    return smallest[:length]


if __name__ == "__main__":
    serve(LlamaCpp, ["llama-cpp-python"])
