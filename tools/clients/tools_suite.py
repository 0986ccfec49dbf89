"""Runs instructor, LangChain, litellm and Ollama's client against `penstock serve`.

    python -m tools.clients.tools_suite

Structured answers of the first two are tool calls. The server has no option for tools. Each client runs with the demo
model's template and with one that shows no tools; the first two with smollm2 too, which is fetched; those that embed
with a server of embeddings. The exit status is 1 after a client that fails, or an answer that does not follow its
schema.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.server_process import ServerProcess, serve_command
from tools.clients.environment import client_python

_PACKAGES = {
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-openai==1.7.4",),
    "litellm": ("litellm==1.110.2",),
    "ollama": ("ollama==0.6.3",),
}
_ENGINE = ("--threads", "1", "--kv-cache-memory-bytes", "64MiB")
# As templates of many small models: neither tools nor messages of the role "tool".
_WITHOUT_TOOLS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SERVERS = {
    "the demo model's template": ("demo",),
    "a template without tools": ("demo", "--chat-template", _WITHOUT_TOOLS),
}
_SMOLLM2 = ("smollm2", "--yes", "--served-model-name", "demo", "--max-model-len", "1024")
_SCHEMAS = """
import sys
from typing import Literal
from pydantic import BaseModel, Field

class Person(BaseModel):
    "A person of whom the text tells."
    city: Literal["Oslo", "Rome"]
    age: int = Field(ge=0, le=150)

url, text = sys.argv[1], "Anna is 31 years old and lives in Oslo."
"""
_PROGRAMS = {
    "instructor": """
import instructor
from openai import OpenAI

client = instructor.from_openai(OpenAI(base_url=url, api_key="unused"))
ask = dict(model="demo", messages=[{"role": "user", "content": text}], seed=1, max_tokens=200)
print(client.chat.completions.create(response_model=Person, **ask))
for partial in client.chat.completions.create_partial(response_model=Person, **ask):
    pass
print(Person.model_validate(partial.model_dump()))

# A first answer that is refused goes back with its call and the error as its result.
attempts = []

class Checked(Person):
    def model_post_init(self, context):
        attempts.append(self)
        if len(attempts) == 1:
            raise ValueError("Try again.")

client.chat.completions.create(response_model=Checked, max_retries=2, **ask)
assert len(attempts) == 2, attempts
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    other = instructor.from_openai(OpenAI(base_url=url, api_key="unused"), mode=mode)
    print(mode, other.chat.completions.create(response_model=Person, **ask))
""",
    "langchain": """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=url, api_key="unused", model="demo", max_tokens=200, seed=1)
for method in ("function_calling", "json_schema"):
    structured = model.with_structured_output(Person, method=method)
    print(method, structured.invoke(text))
    *_, last = structured.stream(text)
    assert isinstance(last, Person), last

@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    "The weather in a city."
    return "sunny"

question = HumanMessage("What is the weather in Rome?")
forced = model.bind_tools([weather], tool_choice="weather").invoke([question])
(call,) = forced.tool_calls
print("forced", call)
print("any", model.bind_tools([weather, Person], tool_choice="any").invoke([question]).tool_calls)
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
free = model.bind_tools([weather])
print("free", free.invoke([question]).content, "|", free.invoke([question, forced, result]).content)
assert list(free.stream([question]))
""",
    "litellm": """
import os

# Prices of models are not fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

litellm.suppress_debug_info = True
root = url.removesuffix("/v1")
TOOL = {"type": "function", "function": {"name": "Person", "parameters": Person.model_json_schema()}}
messages = [{"role": "user", "content": text}]
bases = {"openai": url, "hosted_vllm": url, "ollama": root, "ollama_chat": root}
for provider, base in bases.items():
    ask = dict(model=f"{provider}/demo", api_base=base, api_key="unused", messages=messages, max_tokens=200, seed=1)
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content, whole
    assert whole.usage.completion_tokens > 0, whole
    stream = litellm.completion(**ask, stream=True)
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert joined == whole.choices[0].message.content, (joined, whole)
    schema = {"type": "json_schema", "json_schema": {"name": "Person", "schema": Person.model_json_schema()}}
    structured = litellm.completion(**ask, response_format=schema)
    print(provider, Person.model_validate_json(structured.choices[0].message.content))
    if provider in ("openai", "hosted_vllm"):
        called = litellm.completion(**ask, tools=[TOOL], tool_choice="required")
        (call,) = called.choices[0].message.tool_calls
        print(provider, Person.model_validate_json(call.function.arguments))
    else:
        assert litellm.completion(**ask, tools=[TOOL]).choices[0].finish_reason in ("stop", "tool_calls", "length")
    try:
        litellm.completion(**{**ask, "model": f"{provider}/none"})
    except litellm.NotFoundError:
        pass
    except litellm.APIConnectionError as error:
        # litellm has no type of its own for statuses of Ollama.
        assert provider.startswith("ollama") and "not served here" in str(error), error
    else:
        raise AssertionError("a model that is not served is refused")
""",
    "ollama": """
import asyncio
import ollama

client = ollama.Client(host=url.removesuffix("/v1"))
ask = dict(model="demo", messages=[{"role": "user", "content": text}], options={"seed": 1, "num_predict": 200})
whole = client.chat(**ask)
assert whole.message.content and whole.done and whole.eval_count > 0, whole
assert "".join(part.message.content for part in client.chat(**ask, stream=True)) == whole.message.content
print(Person.model_validate_json(client.chat(**ask, format=Person.model_json_schema()).message.content))

def weather(city: str) -> str:
    \"\"\"The weather in a city.

    Args:
        city: Name of the city
    \"\"\"
    return "sunny"

called = client.chat(**ask, tools=[weather])
call = ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Rome"})
past = [*ask["messages"], ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=call)])]
result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
print(client.chat(**{**ask, "messages": [*past, result]}, tools=[weather]).message.content)
generated = client.generate(model="demo", prompt=text, logprobs=True, top_logprobs=2, options=ask["options"])
assert generated.response and len(generated.logprobs) == generated.eval_count, generated
(model,) = client.list().models
(running,) = client.ps().models
assert model.digest == running.digest and model.size > 0 and model.modified_at < running.expires_at, (model, running)
assert client.show("demo").modelinfo["general.architecture"] == model.details.family
try:
    client.chat(model="none", messages=ask["messages"])
except ollama.ResponseError as error:
    assert error.status_code == 404 and "not served here" in error.error, error
else:
    raise AssertionError("a model that is not served is refused")

async def streamed():
    stream = await ollama.AsyncClient(host=url.removesuffix("/v1")).chat(**ask, stream=True)
    return "".join([part.message.content async for part in stream])

assert asyncio.run(streamed()) == whole.message.content
""",
}
_EMBEDDING_PROGRAMS = {
    "litellm": """
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

root = url.removesuffix("/v1")
vectors = []
for provider, base in {"openai": url, "hosted_vllm": url, "ollama": root}.items():
    found = litellm.embedding(f"{provider}/demo", input=[text, "Hi"], api_base=base, api_key="unused")
    assert found.usage.prompt_tokens > 0, found.usage
    vectors.append([one["embedding"] for one in found.data])
assert all(max(abs(a - b) for a, b in zip(x[0], vectors[0][0])) < 1e-5 for x in vectors)
ranks = litellm.rerank("hosted_vllm/demo", query=text, documents=["Hi", text], api_base=root, api_key="unused")
assert ranks.results[0]["index"] == 1, ranks
""",
    "ollama": """
import ollama

client = ollama.Client(host=url.removesuffix("/v1"))
many = client.embed(model="demo", input=[text, "Hi"])
assert len(many.embeddings) == 2 and many.prompt_eval_count > 0, many
one = client.embeddings(model="demo", prompt=text).embedding
assert len(one) == len(many.embeddings[0])
assert client.show("demo").capabilities == ["embedding"]
""",
}


def main() -> int:
    pythons = {name: client_python(name, packages) for name, packages in _PACKAGES.items()}
    has_failed = False
    for what, command_line in _SERVERS.items():
        has_failed |= _run(pythons, _PROGRAMS, what, *command_line)
    calling = {name: _PROGRAMS[name] for name in ("instructor", "langchain")}
    has_failed |= _run(pythons, calling, "smollm2", *_SMOLLM2)
    embedding = ("demo", "--runner", "pooling", "--convert", "embed")
    has_failed |= _run(pythons, _EMBEDDING_PROGRAMS, "embeddings", *embedding)
    return int(has_failed)


def _run(pythons: dict[str, Path], programs: dict[str, str], what: str, *command_line: str) -> bool:
    """Run the programs against a server of this command line. Returns whether anything failed."""
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ServerProcess(serve_command(*command_line, *_ENGINE), log) as server:
            for name, program in programs.items():
                command = [pythons[name], "-c", _SCHEMAS + program, f"{server.url}/v1"]
                is_wrong = subprocess.run(command, cwd=folder, timeout=300).returncode != 0
                print(f"{name} with {what}: {'FAILED' if is_wrong else 'passed'}", flush=True)
                has_failed |= is_wrong
        text = log.read_text(errors="replace")
    if "Traceback" in text:
        print(f"The server's log has a traceback:\n{text[-4000:]}")
        return True
    return has_failed


if __name__ == "__main__":
    sys.exit(main())
