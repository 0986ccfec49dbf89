"""`/v1/completions` through OpenAI's client, compared with the offline API."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from penstock import LLM, SamplingParams
from support.servers import Served

PROMPT = "ROMEO:\nO, she doth teach"
OTHER = "The quick brown"


def generated(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def complete(client: OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(**{"model": "demo", "prompt": prompt, **fields})


def test_a_greedy_completion_is_that_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    expected = generated(llm, PROMPT, temperature=0, max_tokens=12)
    response = complete(client, temperature=0, max_tokens=12)
    assert response.choices[0].text == expected.outputs[0].text
    assert response.choices[0].finish_reason == "length"
    assert response.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert response.usage.completion_tokens == 12
    assert response.usage.total_tokens == response.usage.prompt_tokens + 12


def test_samples_with_a_seed_are_those_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    expected = generated(llm, PROMPT, seed=7, n=3, max_tokens=10, temperature=0.9)
    response = complete(client, seed=7, n=3, max_tokens=10, temperature=0.9)
    assert [choice.text for choice in response.choices] == [output.text for output in expected.outputs]
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert response.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
    assert response.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_without_max_tokens_there_are_sixteen(client: OpenAI) -> None:
    assert complete(client, temperature=0, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_batch_has_n_choices_per_prompt_in_order(client: OpenAI, llm: LLM, as_ids: bool) -> None:
    prompts = [PROMPT, OTHER]
    expected = [generated(llm, prompt, seed=3, n=2, max_tokens=6) for prompt in prompts]
    given = [output.prompt_token_ids for output in expected] if as_ids else prompts
    response = complete(client, given, seed=3, n=2, max_tokens=6)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert [c.text for c in response.choices] == [out.text for output in expected for out in output.outputs]
    assert response.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)


def test_token_ids_are_one_prompt(client: OpenAI, llm: LLM) -> None:
    ids = [1, 45, 67, 89]
    expected = generated(llm, {"prompt_token_ids": ids}, temperature=0, max_tokens=5)
    response = complete(client, ids, temperature=0, max_tokens=5)
    assert response.choices[0].text == expected.outputs[0].text
    assert response.usage.prompt_tokens == 4


def test_streams_of_a_batch_interleave_and_add_up_to_the_whole(client: OpenAI) -> None:
    # Outputs of several steps may come in one chunk, but not those of hundreds.
    body = {"ignore_eos": True}
    fields: dict[str, Any] = {"prompt": [PROMPT, OTHER], "seed": 5, "n": 2, "max_tokens": 300, "extra_body": body}
    whole = complete(client, **fields)
    texts, reasons, order = [""] * 4, [None] * 4, []
    for chunk in complete(client, stream=True, **fields):
        (choice,) = chunk.choices
        assert chunk.usage is None
        texts[choice.index] += choice.text
        order.append(choice.index)
        if choice.finish_reason is not None:
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert order != sorted(order)


def test_the_usage_of_a_stream_comes_last(client: OpenAI) -> None:
    chunks = list(complete(client, stream=True, max_tokens=4, temperature=0, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4


def test_continuous_usage_counts_up(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"ignore_eos": True}
    chunks = list(complete(client, stream=True, max_tokens=300, stream_options=options, extra_body=body))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 300


def test_log_probabilities_are_those_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    output = generated(llm, PROMPT, temperature=0, max_tokens=6, logprobs=2).outputs[0]
    logprobs = complete(client, temperature=0, max_tokens=6, logprobs=2).choices[0].logprobs
    rows = [row[id] for row, id in zip(output.logprobs, output.token_ids, strict=True)]
    assert logprobs.tokens == [entry.decoded_token for entry in rows]
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in rows])
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 6
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(6)]


def test_streamed_log_probabilities_add_up_to_the_whole(client: OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 1, "echo": True}
    whole = complete(client, **fields).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in complete(client, stream=True, **fields)]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_a_prompt_that_fills_the_context(client: OpenAI, llm: LLM, max_tokens: int) -> None:
    length = llm.config.model.longest_context
    ids = (llm.get_tokenizer().encode(PROMPT) * length)[:length]
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 0, "echo": True}
    shorter = complete(client, ids[:-1], **fields).choices[0].logprobs.token_logprobs
    choice = complete(client, ids, **fields).choices[0]
    assert choice.logprobs.token_logprobs[1 : length - 1] == pytest.approx(shorter[1 : length - 1])
    assert len(choice.logprobs.token_logprobs) == length + max_tokens
    with pytest.raises(BadRequestError, match=f"has {length + 1:,} tokens"):
        complete(client, [*ids, 5], **fields)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_a_prompt_as_lm_eval_asks(client: OpenAI, llm: LLM, max_tokens: int) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    expected = generated(llm, {"prompt_token_ids": ids}, temperature=0, max_tokens=1, prompt_logprobs=1)
    response = complete(client, [ids, ids], max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, seed=1234)
    for choice in response.choices:
        values = choice.logprobs.token_logprobs
        assert len(values) == len(ids) + max_tokens
        assert values[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        rows = expected.prompt_logprobs[1:]
        assert values[1 : len(ids)] == pytest.approx([row[id].logprob for row, id in zip(rows, ids[1:], strict=True)])
        best = [max(entry.logprob for entry in row.values()) for row in rows]
        assert [max(top.values()) for top in choice.logprobs.top_logprobs[1 : len(ids)]] == pytest.approx(best)
        assert choice.text == PROMPT + expected.outputs[0].text * max_tokens
    assert response.usage.completion_tokens == 2 * max_tokens


def test_an_echo_begins_with_the_prompt_as_it_was_given(client: OpenAI) -> None:
    plain = complete(client, [PROMPT, OTHER], temperature=0, max_tokens=4)
    echoed = complete(client, [PROMPT, OTHER], temperature=0, max_tokens=4, echo=True)
    assert [c.text for c in echoed.choices] == [
        given + choice.text for given, choice in zip([PROMPT, OTHER], plain.choices, strict=True)
    ]


def test_a_streamed_echo_comes_once(client: OpenAI) -> None:
    whole = complete(client, temperature=0, max_tokens=4, echo=True).choices[0].text
    assert (
        "".join(c.choices[0].text for c in complete(client, temperature=0, max_tokens=4, echo=True, stream=True))
        == whole
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_never_leaks(client: OpenAI, stream: bool) -> None:
    text = complete(client, temperature=0, max_tokens=30).choices[0].text
    stop = text[10:14]
    response = complete(client, temperature=0, max_tokens=30, stop=[stop], stream=stream)
    parts = [chunk.choices[0] for chunk in response] if stream else response.choices
    assert "".join(part.text for part in parts) == text[: text.index(stop)]
    assert parts[-1].finish_reason == "stop"
    assert parts[-1].stop_reason == stop


def test_prompt_log_probabilities_by_token_id(client: OpenAI, llm: LLM) -> None:
    expected = generated(llm, PROMPT, temperature=0, max_tokens=1, prompt_logprobs=1)
    choice = complete(client, temperature=0, max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
    assert choice.prompt_logprobs[0] is None
    for got, row in zip(choice.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert {int(id) for id in got} == set(row)


def test_token_ids_are_returned_on_request(client: OpenAI, llm: LLM) -> None:
    expected = generated(llm, PROMPT, temperature=0, max_tokens=4)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "extra_body": {"return_token_ids": True}}
    choice = complete(client, **fields).choices[0]
    assert choice.prompt_token_ids == expected.prompt_token_ids
    assert choice.token_ids == expected.outputs[0].token_ids
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, **fields)]
    assert chunks[0].prompt_token_ids == expected.prompt_token_ids
    assert [id for chunk in chunks for id in chunk.token_ids] == expected.outputs[0].token_ids


def test_tokens_are_named_by_their_ids_on_request(client: OpenAI) -> None:
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = complete(client, temperature=0, max_tokens=3, logprobs=1, extra_body=body).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
FORMATS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, "a"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, None),
    ({"response_format": {"type": "text"}}, None),
]


@pytest.mark.parametrize(("fields", "key"), FORMATS)
def test_structured_outputs_are_those_of_the_offline_api(
    client: OpenAI, llm: LLM, fields: dict[str, Any], key: str | None
) -> None:
    constraint = {"json": SCHEMA} if key else fields.get("structured_outputs")
    expected = generated(llm, PROMPT, seed=1, max_tokens=40, structured_outputs=constraint)
    assert complete(client, seed=1, max_tokens=40, extra_body=fields).choices[0].text == expected.outputs[0].text


EXTRAS: list[dict[str, Any]] = [
    {"min_p": 0.2},
    {"top_k": 3},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"logit_bias": {"45": 100}},
    {"allowed_token_ids": [40, 41, 42]},
    {"stop_token_ids": list(range(40, 300)), "min_tokens": 2},
    {"bad_words": ["the"]},
    {"truncate_prompt_tokens": 3},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"top_p": 0.3},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "+".join(extra))
def test_each_field_of_sampling_has_its_effect(client: OpenAI, llm: LLM, extra: dict[str, Any]) -> None:
    expected = generated(llm, PROMPT, seed=11, max_tokens=12, **extra).outputs[0]
    response = complete(client, seed=11, max_tokens=12, extra_body={**extra, "return_token_ids": True})
    assert response.choices[0].token_ids == expected.token_ids
    assert response.choices[0].text == expected.text


def test_top_p_of_0_is_greedy(client: OpenAI, llm: LLM) -> None:
    expected = generated(llm, PROMPT, temperature=0.0, max_tokens=12).outputs[0]
    assert complete(client, temperature=1.2, top_p=0, max_tokens=12).choices[0].text == expected.text


def test_special_tokens_are_not_added_on_request(client: OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT, add_special_tokens=False)
    response = complete(client, max_tokens=1, extra_body={"add_special_tokens": False, "return_token_ids": True})
    assert response.choices[0].prompt_token_ids == ids


def test_cached_tokens_are_counted_and_salts_separate_them(client: OpenAI) -> None:
    prompt = "It was the best of times, it was the worst of times. " * 4

    def cached(salt: str) -> int:
        usage = complete(client, prompt, max_tokens=1, extra_body={"cache_salt": salt}).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_fields_without_an_effect_are_accepted(client: OpenAI) -> None:
    body = {"suffix": "", "metadata": {"a": "b"}, "store": True, "best_of": 1, "logprobs": None}
    assert complete(client, max_tokens=1, user="me", extra_body=body).usage.completion_tokens == 1


def test_the_id_of_a_response_is_the_requests(client: OpenAI) -> None:
    assert complete(client, max_tokens=1, extra_body={"request_id": "mine"}).id == "cmpl-mine"


def test_every_name_of_the_model_is_accepted(client: OpenAI) -> None:
    assert complete(client, max_tokens=1, model="other-name").model == "demo"


REFUSED = [
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"logprobs": 2000}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"timeout": 0}, "timeout"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt_embeds": [1]}, "prompt_embeds"),
    ({"prompt_embeds": "AAAA", "echo": True}, "echo"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt[1]"),
    ({"top_k": 10**60}, "top_k"),
    ({"stop": ["\ud800"]}, "stop[0]"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_a_bad_value_is_refused_with_the_fields_name(server: Served, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/completions", {"model": "demo", "prompt": "a", **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert param.rpartition(".")[2] in reply.error["message"]


def test_a_bad_prompt_in_a_batch_refuses_the_batch(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="token id 99999"):
        complete(client, [[1, 2], [1, 99999]], stream=True)


def test_a_prompt_that_is_too_long_has_both_counts(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        complete(client, [5] * 2000, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert "2,000" in caught.value.message
    assert "1,024" in caught.value.message


def test_a_constraint_that_is_wrong_is_named_as_the_client_did(client: OpenAI) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(BadRequestError) as caught:
        complete(client, extra_body={"response_format": bad})
    assert caught.value.param is not None
    assert caught.value.param.startswith("response_format")
    assert "structured_outputs" not in caught.value.message.split(" ")[0]
