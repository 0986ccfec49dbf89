"""Client of `penstock serve` with the openai package: python client.py [--base-url http://127.0.0.1:8000/v1]

The API key is that of OPENAI_API_KEY; a server without --api-key takes any.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from openai import OpenAI

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def stream_chat(client: OpenAI, model: str, question: str) -> str:
    """Print an answer as it is generated, and return it."""
    text = ""
    with client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_completion_tokens=64, stream=True
    ) as chunks:
        for chunk in chunks:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            print(piece or "", end="", flush=True)
            text += piece or ""
    print()
    return text


def complete_token_ids(client: OpenAI, model: str, token_ids: list[int]) -> tuple[str, int]:
    """Continue a prompt of token ids. Returns the text and the number of its tokens.

    Parameters that OpenAI does not have go into extra_body.
    """
    completion = client.completions.create(
        model=model, prompt=token_ids, max_tokens=16, temperature=0.7, seed=1, extra_body={"top_k": 20, "min_p": 0.05}
    )
    assert completion.usage is not None
    return completion.choices[0].text, completion.usage.completion_tokens


def chat_with_schema(client: OpenAI, model: str, question: str, schema: dict[str, Any]) -> Any:
    """Return an answer that is JSON of a schema."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=128,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    return json.loads(answer.choices[0].message.content or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="the server's first one by default")
    arguments = parser.parse_args()
    with OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = arguments.model or next(iter(client.models.list())).id
        stream_chat(client, model, "What is 47 + 38?")
        print(complete_token_ids(client, model, [5, 6, 7, 8]))
        print(chat_with_schema(client, model, "Invent a person.", PERSON))


if __name__ == "__main__":
    main()
