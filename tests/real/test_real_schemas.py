"""Outputs follow JSON schemas of real use."""

from __future__ import annotations

import json

import jsonschema
import pytest

from penstock import SamplingParams
from penstock.contract import StructuredOutputsParams
from support.real_model import MARKS
from support.schema_files import accepted_schemas

pytestmark = MARKS
_NUM_SCHEMAS, _MAX_TOKENS = 100, 64


@pytest.mark.timeout(1200)
def test_outputs_of_a_hundred_schemas_are_valid_unless_they_are_cut(llm):
    schemas = accepted_schemas(llm.config.model)[:_NUM_SCHEMAS]
    assert len(schemas) == _NUM_SCHEMAS
    question = "Answer in JSON with an example that follows this schema, as short as possible:\n"
    messages = [[{"role": "user", "content": question + json.dumps(schema)}] for schema in schemas]
    params = [
        SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, structured_outputs=StructuredOutputsParams(json=schema))
        for schema in schemas
    ]
    outputs = [output.outputs[0] for output in llm.chat(messages, params, use_tqdm=False)]
    finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "length":
            continue
        finished += 1
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(output.text))
    # Small models ramble; a good many of these schemas end an answer.
    assert finished > _NUM_SCHEMAS / 5
