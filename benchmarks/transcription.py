"""Speech beside Transformers and CTranslate2, which faster-whisper runs on, in turns.

    python -m benchmarks.transcription --output FOLDER [--turns 5] [--clips 10] [--tokens 100] [--layers 6]
        [--ctranslate2 FOLDER]

A random model of Whisper-base's shape writes as many tokens about each of 10 clips of 30 seconds, greedily and in
float32, from samples to token ids. Penstock runs the clips together; the others in batches of all clips and, if that is
faster, one by one. --ctranslate2: folder with its package, of `pip install --target FOLDER ctranslate2`; it gets a
process of its own. Medians over the turns; all run with all cores, one after the other in each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from benchmarks.machine import machine
from penstock import LLM, SamplingParams

_RATE, _SECONDS = 16_000, 30
_NUM_WORDS, _NUM_LANGUAGES, _NUM_STAMPS = 50_257, 99, 1501
_SPECIAL = [
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in list(LANGUAGES)[:_NUM_LANGUAGES])),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
]
_IDS = {token: number for number, token in enumerate(_SPECIAL, _NUM_WORDS)}
_END = _IDS["<|endoftext|>"]
PROMPT = [_IDS[token] for token in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")]
# The child prints its seconds after this, whatever libraries print.
_ANSWER = "seconds:"
transformers.logging.set_verbosity_error()


def make_model(folder: Path, num_layers: int) -> None:
    """Write a random model, with a tokenizer of Whisper's special tokens."""
    config = transformers.WhisperConfig(
        vocab_size=_NUM_WORDS + len(_SPECIAL) + _NUM_STAMPS,
        d_model=512,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        decoder_start_token_id=PROMPT[0],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _END),
    )
    torch.manual_seed(0)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(_NUM_WORDS)} | _IDS
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="<|endoftext|>", additional_special_tokens=_SPECIAL
    )
    fast.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    generation = {
        "decoder_start_token_id": PROMPT[0],
        "eos_token_id": _END,
        "pad_token_id": _END,
        "lang_to_id": {token: _IDS[token] for token in _SPECIAL[2 : 2 + _NUM_LANGUAGES]},
        "task_to_id": {name: _IDS[f"<|{name}|>"] for name in ("translate", "transcribe")},
        "no_timestamps_token_id": _IDS["<|notimestamps|>"],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "alignment_heads": [[num_layers - 1, 0]],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))


def make_clips(count: int, seed: int) -> list[np.ndarray]:
    """Tones with noise, float32."""
    rng = np.random.default_rng(seed)
    times = np.arange(_RATE * _SECONDS) / _RATE
    tones = (np.sin(2 * np.pi * rng.uniform(100, 800) * times) for _ in range(count))
    return [(0.3 * tone + 0.05 * rng.normal(size=len(times))).astype(np.float32) for tone in tones]


class _Transformers:
    """Transformers with the model."""

    def __init__(self, folder: Path) -> None:
        model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        self._model = model.eval()
        self._extract = transformers.WhisperFeatureExtractor()

    def transcribe(self, clips: list[np.ndarray], num_tokens: int, batch_size: int) -> float:
        """Seconds for all clips."""
        began = time.perf_counter()
        for start in range(0, len(clips), batch_size):
            batch = clips[start : start + batch_size]
            features = self._extract(batch, sampling_rate=_RATE, return_tensors="pt").input_features
            with torch.no_grad():
                found = self._model.generate(
                    features,
                    decoder_input_ids=torch.tensor([PROMPT] * len(batch)),
                    max_new_tokens=num_tokens,
                    min_new_tokens=num_tokens,
                    do_sample=False,
                )
            assert found.shape[1] >= num_tokens, "as many tokens for all"
        return time.perf_counter() - began


class _CTranslate2:
    """CTranslate2 in a process of its own. packages: folder with it."""

    def __init__(self, folder: Path, packages: Path) -> None:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(packages)])}
        command = [sys.executable, "-m", "benchmarks.transcription", "--serve-ctranslate2", str(folder)]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._folder = folder

    def transcribe(self, clips: list[np.ndarray], num_tokens: int, batch_size: int) -> float:
        """Seconds for all clips."""
        np.save(self._folder / "clips.npy", np.stack(clips))
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it is a pipe"
        assert stdout is not None, "it is a pipe"
        print(json.dumps([num_tokens, batch_size]), file=stdin, flush=True)
        for line in stdout:
            if line.startswith(_ANSWER):
                return float(line.removeprefix(_ANSWER))
        raise RuntimeError(f"CTranslate2 ended with code {self._process.wait()}.")

    def close(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait()


def serve_ctranslate2(folder: Path) -> None:
    """Convert the model, and answer each line of [tokens, clips of a batch] with the seconds for the saved clips."""
    import ctranslate2  # type: ignore[import-not-found]
    from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]

    converted = str(folder / "ctranslate2")
    TransformersConverter(str(folder)).convert(converted, quantization="float32")
    model = ctranslate2.models.Whisper(converted, device="cpu", compute_type="float32", intra_threads=os.cpu_count())
    extract = transformers.WhisperFeatureExtractor()
    for line in sys.stdin:
        num_tokens, batch_size = json.loads(line)
        clips = list(np.load(folder / "clips.npy"))
        began = time.perf_counter()
        for start in range(0, len(clips), batch_size):
            batch = clips[start : start + batch_size]
            features = extract(batch, sampling_rate=_RATE, return_tensors="np").input_features
            results = model.generate(
                ctranslate2.StorageView.from_array(np.ascontiguousarray(features)),
                [PROMPT] * len(batch),
                beam_size=1,
                # It generates up to half as many.
                max_length=2 * num_tokens,
                suppress_blank=False,
                suppress_tokens=[_END],
            )
            lengths = {len(one.sequences_ids[0]) for one in results}
            assert lengths == {num_tokens}, f"as many tokens for all, not {lengths}"
        print(f"{_ANSWER}{time.perf_counter() - began}", flush=True)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each turn; the first one warms up."""
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    others: dict[str, Any] = {"transformers": _Transformers(folder)}
    if arguments.ctranslate2 is not None:
        others["ctranslate2"] = _CTranslate2(folder, arguments.ctranslate2)
    turns: list[dict[str, float]] = []
    with LLM(str(folder), dtype="float32", max_num_seqs=max(16, arguments.clips)) as llm:
        for turn in range(arguments.turns + 1):
            clips = make_clips(arguments.clips, turn)
            prompts: Any = [
                {
                    "encoder_prompt": {"multi_modal_data": {"audio": (clip, _RATE)}},
                    "decoder_prompt": {"prompt_token_ids": PROMPT},
                }
                for clip in clips
            ]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = {"penstock": time.perf_counter() - began}
            assert {len(one.outputs[0].token_ids) for one in outputs} == {arguments.tokens}
            for name, engine in others.items():
                sizes = {1, arguments.clips}
                seconds[name] = min(engine.transcribe(clips, arguments.tokens, size) for size in sizes)
            turns.append(seconds)
            print({name: round(value, 3) for name, value in seconds.items()}, flush=True)
    if "ctranslate2" in others:
        others["ctranslate2"].close()
    return {name: [turn[name] for turn in turns[1:]] for name in turns[0]}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Folder of the results as JSON")
    parser.add_argument("--ctranslate2", type=Path, help="Folder with the package ctranslate2")
    parser.add_argument("--serve-ctranslate2", type=Path, help=argparse.SUPPRESS)
    for name, default in (("turns", 5), ("clips", 10), ("tokens", 100), ("layers", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if arguments.serve_ctranslate2 is not None:
        serve_ctranslate2(arguments.serve_ctranslate2)
        return
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), arguments.layers)
        results = measure(Path(name), arguments)
    for other in results.keys() - {"penstock"}:
        ratios = [theirs / own for theirs, own in zip(results[other], results["penstock"], strict=True)]
        print(f"times as fast as {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        facts = {**machine(torch.get_num_threads()), "seconds": results}
        (arguments.output / "transcription.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
