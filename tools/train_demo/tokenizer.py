"""The demo model's tokenizer: byte-level BPE with one token per digit, role markers and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .dialogue import Message

VOCAB_SIZE = 1536
MAX_LENGTH = 1024

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- if messages[0]['role'] == 'system' -%}
        {{- messages[0]['content'] | trim + '\\n\\n' -}}
        {%- set messages = messages[1:] -%}
    {%- endif -%}
    {{- 'You can call these functions:\\n' -}}
    {%- for tool in tools -%}
        {{- tool.get('function', tool) | tojson + '\\n' -}}
    {%- endfor -%}
    {{- 'To call functions, answer with nothing but the calls, in this form:\\n' -}}
    {{- '[{"name": "FUNCTION", "parameters": {"PARAMETER": "VALUE"}}]' + eos_token -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|user|>Result of ' + message['name'] | default('a call') + ': ' -}}
        {{- message['content'] | trim + eos_token -}}
    {%- elif message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('The demo model knows system, user, assistant and tool, not ' + message['role']) -}}
    {%- else -%}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim -}}
        {%- if message['tool_calls'] -%}
            {{- '\\n' if message['content'] | trim -}}
            {%- for call in message['tool_calls'] -%}
                {{- ('[' if loop.first else ', ') + '{"name": ' + call['function']['name'] | tojson -}}
                {{- ', "parameters": ' + call['function']['arguments'] | tojson + '}' -}}
            {%- endfor -%}
            {{- ']' -}}
        {%- endif -%}
        {{- eos_token -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `VOCAB_SIZE` tokens from the texts.

    Digits are split off first, so every number is a sequence of single-digit tokens. Plain encoding puts the begin
    token in front; the chat template writes it itself.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BEGIN, END, *ROLES.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES.values()),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def token_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a text of any length, with nothing added."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files, naming the class that every version of Transformers with fast tokenizers knows."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation as the chat template writes it, and which of them the model has to predict.

    Predicted are the assistant's words and the end-of-turn token after them.
    """
    end = tokenizer.convert_tokens_to_ids(END)
    ids = [tokenizer.convert_tokens_to_ids(BEGIN)]
    predicted = [False]
    for message in messages:
        words = token_ids(tokenizer, message["content"])
        ids += [tokenizer.convert_tokens_to_ids(ROLES[message["role"]]), *words, end]
        predicted += [False] + [message["role"] == "assistant"] * (len(words) + 1)
    return ids, predicted
