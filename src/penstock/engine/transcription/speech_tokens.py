"""Special tokens of Whisper: languages, tasks and timestamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.checkpoints.shown_model import shown_model
from penstock.config import ModelConfig
from penstock.contract.param_checks import shown
from penstock.errors import InvalidParameter, UnsupportedFeature
from penstock.text.tokenizer import Tokenizer

TASKS = ("transcribe", "translate")


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Token ids.

    start: of the decoder's text. previous: of text before it; None without one. languages: by code; empty for a model
    of one language. tasks: by name. no_timestamps: of a text without timestamps; None where there are none. no_speech:
    says that there is no speech; None without one. end: the first token that is no text.
    alignment_heads: layer and head of the cross attention that tells when a token is spoken; empty if none is known.
    """

    start: int
    previous: int | None
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None
    no_speech: int | None
    end: int
    alignment_heads: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, model: ModelConfig, tokenizer: Tokenizer) -> SpeechTokens:
        """Read the tokens. Raises UnsupportedFeature for a model of another kind."""
        fields = model.hf_generation_config
        start = fields.get("decoder_start_token_id", model.hf_config.get("decoder_start_token_id"))
        if not model.is_encoder_decoder or "num_mel_bins" not in model.hf_config or not isinstance(start, int):
            raise UnsupportedFeature(
                f"{shown_model(model.model)} ({model.architecture}) transcribes no speech. Use a Whisper model."
            )

        def token(text: str) -> int | None:
            ids = tokenizer.encode(text, add_special_tokens=False)
            return ids[0] if len(ids) == 1 else None

        languages = {
            name.strip("<|>"): one for name, one in (fields.get("lang_to_id") or {}).items() if isinstance(one, int)
        }
        stamps = fields.get("no_timestamps_token_id")
        return cls(
            start=start,
            previous=token("<|startofprev|>"),
            languages=languages,
            tasks={name: one for name, one in (fields.get("task_to_id") or {}).items() if isinstance(one, int)},
            no_timestamps=stamps if isinstance(stamps, int) else None,
            # Later models have renamed it.
            no_speech=next(filter(None, map(token, ("<|nospeech|>", "<|nocaptions|>"))), None),
            end=min(model.eos_token_ids, default=model.vocab_size),
            alignment_heads=[(layer, head) for layer, head in fields.get("alignment_heads") or ()],
        )

    def code_of(self, language: str | None) -> str | None:
        """Code of a language that is given by its code or its English name, in any case; None for None.

        Raises InvalidParameter for a language that the model does not know.
        """
        if language is None:
            return None
        known = self.languages or ("en",)
        name = language.strip().lower()
        code = name if name in known else _codes().get(name)
        if code not in known:
            raise InvalidParameter(
                f"language={shown(language)} is not one of this model. Allowed: {', '.join(known)}, or their English "
                "names."
            )
        return code

    def check(self, task: str, *, timestamps: bool, words: bool) -> None:
        """Raise InvalidParameter for what the model does not do."""
        if task not in (self.tasks or TASKS[:1]):
            raise InvalidParameter(
                f"task={task!r} is not one of this model. Allowed: {', '.join(self.tasks) or TASKS[0]}."
            )
        if timestamps and self.no_timestamps is None:
            raise InvalidParameter("This model has no timestamps. Ask for text without them.")
        if words and not self.alignment_heads:
            raise InvalidParameter(
                "This model has no timestamps of words: its generation_config.json has no alignment_heads. Ask for "
                "those of segments."
            )

    def begin(self, task: str, language: str | None, before: Sequence[int], *, timestamps: bool) -> list[int]:
        """The decoder's prompt. before: tokens of text before this one."""
        ids = [self.previous, *before] if before and self.previous is not None else []
        ids.append(self.start)
        if self.languages and language is not None:
            ids.append(self.languages[language])
        if task in self.tasks:
            ids.append(self.tasks[task])
        if not timestamps and self.no_timestamps is not None:
            ids.append(self.no_timestamps)
        return ids

    def stamp(self, token_id: int) -> int | None:
        """Number of a timestamp, from 0 on; None for another token."""
        first = None if self.no_timestamps is None else self.no_timestamps + 1
        return None if first is None or token_id < first else token_id - first


def _codes() -> Mapping[str, str]:
    """Codes of languages by their English names."""
    # Importing it takes a second.
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return dict(TO_LANGUAGE_CODE)
