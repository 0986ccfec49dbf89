"""Fields that no request model has: of OpenAI's and vLLM's requests, accepted or refused; harmless ones of others."""

from __future__ import annotations

from typing import Any, NamedTuple


class OtherField(NamedTuple):
    """A field that changes nothing here.

    allowed: values that ask for nothing; None allows all. why: why there are no others, for the error.
    """

    allowed: tuple[Any, ...] | None
    why: str

    def allows(self, value: Any) -> bool:
        """Whether a value asks for nothing. 0 is not False."""
        return self.allowed is None or any(type(value) is type(one) and value == one for one in self.allowed)


_NO_EFFECT = OtherField(None, "it changes no answer")
_ONE_MODEL_OF_TEXT = "models here read and write text"
_NOT_SEARCHED = "there is no search of the web here"
_OLD_TOOLS = "give tools and tool_choice, which have replaced it"

OTHER_FIELDS: dict[str, OtherField] = {
    # About the client's account or OpenAI's service; they change no answer.
    "user": _NO_EFFECT,
    "metadata": _NO_EFFECT,
    "store": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "prompt_cache_key": _NO_EFFECT,
    "prompt_cache_options": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "verbosity": _NO_EFFECT,
    # These would change the answer.
    "suffix": OtherField(("",), "models here continue a text, and fill no gap in one"),
    "modalities": OtherField((["text"],), _ONE_MODEL_OF_TEXT),
    "audio": OtherField((), _ONE_MODEL_OF_TEXT),
    "prediction": OtherField((), "give the engine speculative_config={'method': 'ngram', ...} instead"),
    "web_search_options": OtherField((), _NOT_SEARCHED),
    "functions": OtherField(([],), _OLD_TOOLS),
    "function_call": OtherField(("none",), _OLD_TOOLS),
    "moderation": OtherField((), "there is no moderation of texts here"),
    "use_beam_search": OtherField((False,), "LLM.beam_search has it"),
    "length_penalty": OtherField((1, 1.0), "it belongs to beam search, which LLM.beam_search has"),
    "logits_processors": OtherField(([],), "the engine's option logits_processors loads them"),
    "media_io_kwargs": OtherField(({},), "it is an option of the engine"),
}

_OF_TOKENS = 'it belongs to models that generate; `/pooling` with task="token_embed" returns a vector per token'

# Fields of the pooling routes.
POOLING_OTHER_FIELDS: dict[str, OtherField] = {
    **OTHER_FIELDS,
    "kv_transfer_params": OtherField((), "it belongs to models that generate"),
    "return_hidden_states": OtherField((False,), _OF_TOKENS),
    "hidden_states_layers": OtherField((), _OF_TOKENS),
}

# Fields of `/v1/responses`.
RESPONSES_OTHER_FIELDS: dict[str, OtherField] = {
    "user": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "prompt_cache_key": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "prompt_cache_options": _NO_EFFECT,
    "client_metadata": _NO_EFFECT,
    "max_tool_calls": OtherField(None, "it limits calls of OpenAI's own tools"),
    "conversation": OtherField((), "give previous_response_id, or the conversation as input"),
    "prompt": OtherField((), "prompts are not stored here; give instructions and input"),
    "truncation": OtherField(("disabled",), "a conversation that is too long is refused; shorten it"),
    "context_management": OtherField(([],), "conversations are not shortened here"),
    "moderation": OtherField((), "there is no moderation of texts here"),
}

# Fields of `/v1/messages`.
MESSAGES_OTHER_FIELDS: dict[str, OtherField] = {
    "metadata": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "inference_geo": _NO_EFFECT,
    "speed": _NO_EFFECT,
    "diagnostics": _NO_EFFECT,
    "user_profile_id": _NO_EFFECT,
    "cache_control": OtherField(None, "prefixes are cached without it"),
    "context_management": OtherField(None, "conversations are used as they are sent"),
    "container": OtherField((), "code is not run here"),
    "mcp_servers": OtherField(([],), "servers of tools are not called here; give their tools"),
}

# Fields of other servers' clients that would change no answer here, by what they are about. Every route ignores them.
HARMLESS_FIELDS = frozenset(
    (
        # Prefix caching and slots of llama.cpp's server.
        "cache_prompt",
        "id_slot",
        "n_cache_reuse",
        "timings_per_token",
        "return_progress",
        # Memory, devices and lifetime of a model that Ollama or LM Studio loads per request.
        "keep_alive",
        "ttl",
        "num_ctx",
        "num_batch",
        "num_keep",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "vocab_only",
        "use_mmap",
        "use_mlock",
        # Labels and routing of proxies and of their logs.
        "custom_llm_provider",
        "num_retries",
        "provider",
        "route",
        "rid",
        "session_id",
        "conversation_id",
        "chat_id",
        "trace_id",
        "tags",
        # Versions of Anthropic's API in bodies.
        "anthropic_version",
        "anthropic_beta",
        "betas",
    )
)
