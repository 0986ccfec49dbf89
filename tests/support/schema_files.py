"""JSON schemas of real use, which are no part of the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tools.check_schemas import read

from penstock.config import ModelConfig
from penstock.contract import StructuredOutputsParams
from penstock.errors import PenstockError
from penstock.structured.llguidance_backend import LLGuidanceBackend
from penstock.text.tokenizer import load_tokenizer

_CHECKOUT = Path(__file__).resolve().parents[2]
SUITE, REAL = "json-schema-test-suite-2020-12", "maskbench-sample"
_LONGEST = 600


def schema_file(name: str) -> Path:
    """File of schemas. Skips the test where there is none."""
    folder = Path(os.environ.get("PENSTOCK_TEST_DATA") or _CHECKOUT.parent / "shared" / "data")
    path = folder / "json_schemas" / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} does not exist: the data of this test is not part of the repository")
    return path


def accepted_schemas(model: ModelConfig) -> list[Any]:
    """Short schemas of real use that compile for a model's tokenizer."""
    tokenizer = load_tokenizer(model.tokenizer_folder)
    backend = LLGuidanceBackend(tokenizer.as_json() or "", model.vocab_size, model.eos_token_ids)

    def is_accepted(schema: Any) -> bool:
        try:
            backend.compile(StructuredOutputsParams(json=schema))
        except PenstockError:
            return False
        return True

    schemas = [case["schema"] for case in read([schema_file(REAL)])]
    return [schema for schema in schemas if len(json.dumps(schema)) < _LONGEST and is_accepted(schema)]
