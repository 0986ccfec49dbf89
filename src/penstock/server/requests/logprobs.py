"""Log-probabilities in the shapes of chat completions, completions and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.output.outputs import Logprob
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer

# Log-probability of an impossible token, since JSON has no infinity.
_LOWEST_LOGPROB = -9999.0

Row = Mapping[int, Logprob]


class LogprobsFormat:
    """Format of log-probabilities.

    most: number of most likely tokens per position, -1 for all. names_ids: name tokens as "token_id:17".
    """

    def __init__(self, tokenizer: Tokenizer, most: int, *, names_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._names_ids = names_ids

    def chat(self, token_ids: Sequence[int], rows: Sequence[Row]) -> dict[str, Any]:
        """`logprobs` of a chat completion's choice."""
        return {
            "content": [
                {**self._entry(id, row[id]), "top_logprobs": [self._entry(*item) for item in self._likeliest(row)]}
                for id, row in zip(token_ids, rows, strict=True)
            ],
            "refusal": None,
        }

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_ids else self._tokenizer.token_text(token_id)

    def top(self, token_id: int, row: Row) -> dict[str, float]:
        """Most likely tokens of a position by name, with the position's own token."""
        top: dict[str, float] = {}
        for other, entry in [*self._likeliest(row), (token_id, row[token_id])]:
            # Tokens of the same text, such as incomplete characters: the most likely one.
            top.setdefault(self.name(other), finite(entry.logprob))
        return top

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": finite(entry.logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _likeliest(self, row: Row) -> list[tuple[int, Logprob]]:
        """Most likely tokens of a row, as many as requested; the row has its own token too."""
        ranked = sorted(row.items(), key=lambda item: item[1].rank)
        return ranked if self._most < 0 else [item for item in ranked if item[1].rank <= self._most]


class CompletionLogprobs:
    """Log-probabilities of one sample of `/v1/completions`, in parts.

    detokenizer: a new one, with which the tokens' places in the text are found.
    """

    def __init__(self, form: LogprobsFormat, detokenizer: Detokenizer) -> None:
        self._form = form
        self._detokenizer = detokenizer
        self._offset = 0

    def part(self, token_ids: Sequence[int], rows: Sequence[Row | None]) -> dict[str, Any]:
        """`logprobs` of the next tokens; a row of None, that of a prompt's first token, has no log-probability."""
        offsets, names, values, tops = [], [], [], []
        for token_id, row in zip(token_ids, rows, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
            names.append(self._form.name(token_id))
            values.append(None if row is None else finite(row[token_id].logprob))
            tops.append(None if row is None else self._form.top(token_id, row))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}


def prompt_logprobs(rows: Sequence[Row | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: per token, entries by token id; None for the first."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for id, entry in row.items()
        }
        for row in rows
    ]


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
