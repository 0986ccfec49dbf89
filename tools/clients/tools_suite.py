"""Runs instructor and LangChain, whose structured answers are tool calls, against `penstock serve`.

    python -m tools.clients.tools_suite

The server has no option for tools. Each client runs with the demo model's template and with one that shows no tools.
The exit status is 1 after a client that fails, or an answer that does not follow its schema.
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
}
_ENGINE = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB")
# As templates of many small models: neither tools nor messages of the role "tool".
_WITHOUT_TOOLS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEMPLATES = {"the demo model's template": (), "a template without tools": ("--chat-template", _WITHOUT_TOOLS)}
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
}


def main() -> int:
    status = 0
    pythons = {name: client_python(name, packages) for name, packages in _PACKAGES.items()}
    for template, options in _TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "server.log"
            with ServerProcess(serve_command("demo", *_ENGINE, *options), log) as server:
                for name, program in _PROGRAMS.items():
                    command = [pythons[name], "-c", _SCHEMAS + program, f"{server.url}/v1"]
                    has_failed = subprocess.run(command, cwd=folder, timeout=300).returncode != 0
                    print(f"{name} with {template}: {'FAILED' if has_failed else 'passed'}", flush=True)
                    status |= has_failed
            text = log.read_text(errors="replace")
            if "Traceback" in text:
                print(f"The server's log has a traceback:\n{text[-4000:]}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
