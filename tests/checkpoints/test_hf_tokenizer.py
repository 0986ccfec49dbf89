"""Python code that comes with a checkpoint never runs, whatever stdin says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import byte_level_tokenizer, write_tokenizer

OWN_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizer

Path({marker!r}).touch()


class T(PreTrainedTokenizer):
    pass
"""
LOADERS = {
    "the engine": "from penstock.text.tokenizer import load_tokenizer; load_tokenizer(folder)",
    "callers": (
        "from penstock.text.tokenizer import FastBackend, Tokenizer; from tokenizers import Tokenizer as Fast\n"
        "fast = FastBackend(Fast.from_file(str(folder / 'tokenizer.json')))\n"
        "Tokenizer(folder, fast, vocab_size=1, bos_token_id=None, eos_token_id=None).for_callers()"
    ),
    "a calibration": (
        "from penstock.loader.calibration_text import read_calibration_text\n"
        "(folder / 'texts.jsonl').write_text('{\"text\": \"the fox\"}')\n"
        "read_calibration_text(folder / 'texts.jsonl', folder)"
    ),
}
DECLARATIONS: dict[str, dict[str, Any]] = {
    "by kind": {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"},
    "only the fast one": {"auto_map": {"AutoTokenizer": [None, "evil.T"]}, "tokenizer_class": "T"},
    "as a list": {"auto_map": ["evil.T", None], "tokenizer_class": "T"},
}


@pytest.mark.parametrize("declared", DECLARATIONS.values(), ids=DECLARATIONS)
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.slow
def test_a_tokenizers_own_code_is_refused_by_name_and_never_asked_about(
    tmp_path: Path, load: str, declared: dict[str, Any]
) -> None:
    marker = tmp_path / "it-ran"
    folder = write_tokenizer(tmp_path / "model", byte_level_tokenizer())
    (folder / "config.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **declared}))
    (folder / "evil.py").write_text(OWN_CODE.format(marker=str(marker)))
    program = f"from pathlib import Path\nfolder = Path({str(folder)!r})\n{load}"
    result = subprocess.run(
        [sys.executable, "-c", program], input="y\n" * 9, capture_output=True, text=True, check=False, timeout=120
    )
    assert not marker.exists()
    assert "[y/N]" not in result.stdout
    reason = result.stderr.strip().splitlines()[-1]
    assert reason.startswith("penstock.errors.TokenizerError: ")
    assert "tokenizer_config.json has auto_map=" in reason
    assert "evil.T" in reason
    assert "=True" not in reason
