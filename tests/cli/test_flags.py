"""Messages on the command line name options by their flags."""

from __future__ import annotations

import pytest

from penstock.cli.flags import Flags

FLAGS = Flags(
    engine={
        "max_model_len": "--max-model-len",
        "device": "--device",
        "seed": "--engine-seed",
        "num_threads": "--threads",
    },
    own={"model": "--model", "seed": "--seed", "top_k": "--top-k", "n": "--n"},
)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("lower max_model_len or free memory", "lower --max-model-len or free memory"),
        ("start with max_model_len=46.", "start with --max-model-len 46."),
        ("max_model_len=1,024 tokens, and", "--max-model-len 1024 tokens, and"),
        ("max_model_len='two words' is not valid", "--max-model-len 'two words' is not valid"),
        ("started for 64 (max_model_len), of which", "started for 64 (--max-model-len), of which"),
        ("num_threads=0 is not valid", "--threads 0 is not valid"),
        ("device='cuda' is not there. Use device='cpu'.", "--device cuda is not there. Use --device cpu."),
        ("model='x': no such folder", "--model x: no such folder"),
        ("needs policy='priority'", "needs --policy priority"),
        ("Start with max_logprobs=99 for more", "Start with --max-logprobs 99 for more"),
        ("loaded with the option logits_processors.", "loaded with --logits-processors."),
        (
            "logits_processors=['a', 'b'] is bad",
            '--logits-processors \'["a", "b"]\' is bad',
        ),
        ("name another with the option tokenizer.", "name another with --tokenizer."),
        ("enable_sp=True needs more", "--enable-sp needs more"),
        ("use_tqdm_on_load=False is fine", "--no-use-tqdm-on-load is fine"),
        ("seed=-1 is not valid", "--engine-seed -1 is not valid"),
        # What vLLM has, and Penstock has not.
        ("enable_lora=True asks for LoRA", "--enable-lora asks for LoRA"),
        (
            "enable_chunked_prefill=False asks for it. Set max_model_len",
            "--no-enable-chunked-prefill asks for it. Set --max-model-len",
        ),
        ("max_model_len='fp8' asks for it", "--max-model-len fp8 asks for it"),
        ("spec_config={'a': {'b': 1}} asks for it", "--spec-config asks for it"),
        # What is not an option of the engine's, or no mention of one.
        ("the model runs on this device", "the model runs on this device"),
        ("has no meaning for quantization=None", "has no meaning for quantization=None"),
        ("max_model_length=3 and my_max_model_len=3", "max_model_length=3 and my_max_model_len=3"),
        ("/tmp/max_model_len/a and max_model_len.txt", "/tmp/max_model_len/a and max_model_len.txt"),
        ("top_k=-5 is not valid", "top_k=-5 is not valid"),
        ("--option 'x' is not valid. Allowed: NAME=VALUE, such as block_size=32.", None),
        ("There is no option x. Known options: block_size, max_model_len.", None),
        ("Not enough.\n  as set by max_model_len  3 GiB", None),
    ],
)
def test_options_of_the_engine_are_read_as_flags(message: str, read: str | None) -> None:
    assert FLAGS.of_engine(message) == (message if read is None else read)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("top_k=-5 is not valid", "--top-k -5 is not valid"),
        ("n=0 is not valid", "--n 0 is not valid"),
        ("seed=-1 is not valid", "--seed -1 is not valid"),
        ("or start with max_model_len=46.", "or start with --max-model-len 46."),
        # A file has them by their names, but the engine's options are flags all the same.
        ("in.jsonl, line 3: seed=-1 and top_k=-5", "in.jsonl, line 3: seed=-1 and top_k=-5"),
        ("in.jsonl, line 3: start with max_model_len=46.", "in.jsonl, line 3: start with --max-model-len 46."),
    ],
)
def test_parameters_of_requests_are_read_as_flags_unless_a_file_has_them(message: str, read: str) -> None:
    assert FLAGS.of_request(message) == read
