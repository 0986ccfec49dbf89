"""Prompts of pooling requests: named prompts of embedding models, and pairs of rerankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from penstock.checkpoints.pooling import PoolingConfig
from penstock.checkpoints.shown_model import shown_model
from penstock.config import ModelConfig
from penstock.contract import PoolingParams
from penstock.contract.param_checks import shown
from penstock.engine.inputs.conversation import Message, render_prompt
from penstock.engine.inputs.prompts import Prompt, RenderedText, TextPair, as_list
from penstock.errors import InvalidParameter, InvalidRequest
from penstock.text.tokenizer import Tokenizer

# Template of the contents alone.
_CONTENTS = "{% for message in messages %}{{ message.content }}{% endfor %}"


def check_task(model: ModelConfig, *tasks: str | None) -> PoolingConfig:
    """Return the model's pooling, if it can do one of these tasks; None stands for any.

    Raises InvalidParameter, with the tasks that it can do.
    """
    pooling = model.pooling
    if pooling is None:
        raise InvalidParameter(
            f"{shown_model(model.model)} generates text here. Start the engine with runner='pooling' for embeddings, "
            "scores and classes."
        )
    if None not in tasks and not set(tasks) & set(pooling.tasks):
        raise InvalidParameter(
            f"{shown_model(model.model)} cannot do {' or '.join(map(str, tasks))}: it has {pooling.architecture.name}. "
            f"Allowed: {', '.join(pooling.tasks)}."
        )
    return pooling


def refuse_generation(model: ModelConfig) -> None:
    """Raise InvalidRequest for a model that pools."""
    if model.pooling is not None:
        raise InvalidRequest(
            f"{shown_model(model.model)} pools here, and generates no text. Its tasks: "
            f"{', '.join(model.pooling.tasks)}. Start the engine with "
            "runner='generate' for text, if the model has a language model head."
        )


def check_is_pooling_params(params: Any, task: str | None = None) -> None:
    """Raise InvalidParameter for anything but pooling parameters, and for those of another task than `task`."""
    if not isinstance(params, PoolingParams):
        raise InvalidParameter(
            f"pooling_params is a {type(params).__name__}: {shown(params)}. Allowed: PoolingParams, or None."
        )
    if task is not None and params.task not in (None, task):
        raise InvalidParameter(f"pooling_params has task={params.task!r}, but {task!r} is asked for. Leave it out.")


def named_prompt(pooling: PoolingConfig, prompt: Prompt, name: str | None) -> Prompt:
    """Put a prompt of the model's files before a text. name: None takes the default one, if there is one.

    Raises InvalidParameter for an unknown name, or for token ids with a name.
    """
    if name is None:
        name = pooling.default_prompt_name
        is_asked = False
    else:
        is_asked = True
        if name not in pooling.prompts:
            known = ", ".join(sorted(pooling.prompts)) or "none, since the model has no prompts"
            raise InvalidParameter(f"prompt_name={shown(name)} is not valid. Allowed: {known}.")
    if name is None:
        return prompt
    before = pooling.prompts[name]
    if isinstance(prompt, str):
        return before + prompt
    fields: Any = prompt
    if isinstance(prompt, Mapping) and isinstance(fields.get("prompt"), str) and fields.get("prompt_token_ids") is None:
        return {**fields, "prompt": before + fields["prompt"]}
    if is_asked:
        raise InvalidParameter(f"prompt_name={name!r} is for texts, and the prompt has token ids. Leave one out.")
    return prompt


def conversation_prompt(
    tokenizer: Tokenizer, pooling: PoolingConfig, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> Prompt:
    """Prompt of a conversation: as the chat template writes it, or, of a model of images or texts, without its roles.

    Raises what `render_prompt` does.
    """
    if not pooling.architecture.embeds_images:
        return render_prompt(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    prompt: Any = render_prompt(tokenizer, messages, chat_template=_CONTENTS, add_generation_prompt=False)
    return cast("Prompt", {**prompt, "prompt": str(prompt["prompt"]).strip()})


def texts_of(name: str, data: Any) -> list[str]:
    """A list of texts. Raises InvalidRequest for anything else."""
    listed = [data] if isinstance(data, str) else as_list(data)
    if listed is None or not all(isinstance(text, str) for text in listed):
        raise InvalidRequest(f"{name}={shown(data)} is not valid. Allowed: a text, or a list of texts.")
    return listed


def pairs_of(first_name: str, first: Any, second_name: str, second: Any) -> list[tuple[str, str]]:
    """Pairs of one text with each of others, or of as many. Raises InvalidRequest for other numbers of texts."""
    ones, others = texts_of(first_name, first), texts_of(second_name, second)
    if len(ones) not in (1, len(others)) or not others:
        raise InvalidRequest(
            f"{first_name} has {len(ones)} texts and {second_name} {len(others)}. Allowed: one, or as many as "
            f"{second_name}."
        )
    return list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))


def score_prompts(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], chat_template: str | Path | None
) -> list[Prompt]:
    """Prompts of a cross-encoder: pairs, or a template's text with the query and the document.

    Raises InvalidRequest where the template refuses them.
    """
    if chat_template is None:
        return [TextPair(*pair) for pair in pairs]
    return [
        RenderedText(
            tokenizer.apply_chat_template(
                [{"role": "query", "content": query}, {"role": "document", "content": document}],
                add_generation_prompt=False,
                chat_template=chat_template,
            )
        )
        for query, document in pairs
    ]
