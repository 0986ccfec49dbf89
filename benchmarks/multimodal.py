"""Prompts with images beside Transformers, in turns, and what images cost a text model.

    python -m benchmarks.multimodal --output FOLDER [--turns 5] [--images 16] [--tokens 64] [--layers 30]

A random model of SmolVLM-256M's shape answers a question about each of 16 images of 512 x 512 pixels, each in one tile
of 64 tokens. Penstock runs the requests together; Transformers in left-padded batches of 16 and, if that is faster, of
4. Measured besides: the first token of a second question about the same image beside that of the first one, and texts
alone on this model beside the language model saved by itself. Medians over the turns; both run with all cores in
float32, one after the other in each turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock import LLM, SamplingParams
from penstock.media.processors.reading import read_processor

_VOCABULARY = 49_280
_SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"]
_IMAGE_SIZE, _ROWS = 512, 64
_WORDS_PER_TEXT = 32


def make_model(folder: Path, num_layers: int) -> tuple[Path, Path]:
    """Write the multimodal model, and its language model alone; returns their folders."""
    text = {
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": _VOCABULARY - 4,
    }
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
        "image_size": _IMAGE_SIZE,
    }
    image_id = _VOCABULARY - len(_SPECIAL)
    config = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=4, image_token_id=image_id, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = transformers.SmolVLMForConditionalGeneration(config)
    seeing, alone = folder / "seeing", folder / "alone"
    model.save_pretrained(seeing)
    language_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    language_model.model.load_state_dict(model.model.text_model.state_dict())
    language_model.save_pretrained(alone)
    for place in (seeing, alone):
        _write_tokenizer(place, image_id)
    (seeing / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "SmolVLMImageProcessor",
                "do_image_splitting": False,
                "size": {"longest_edge": _IMAGE_SIZE},
                "max_image_size": {"longest_edge": _IMAGE_SIZE},
            }
        )
    )
    (seeing / "processor_config.json").write_text(json.dumps({"image_seq_len": _ROWS}))
    return seeing, alone


def _write_tokenizer(folder: Path, first_special: int) -> None:
    vocabulary = {f"w{number}": number for number in range(first_special)}
    vocabulary |= {token: first_special + number for number, token in enumerate(_SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", additional_special_tokens=_SPECIAL
    )
    made.save_pretrained(folder)


def make_images(count: int, seed: int) -> list[Image.Image]:
    """Pictures of smooth random colours."""
    rng = np.random.default_rng(seed)
    coarse = [Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(count)]
    return [one.resize((_IMAGE_SIZE, _IMAGE_SIZE), Image.Resampling.BICUBIC) for one in coarse]


def _words(seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"w{number}" for number in rng.integers(2, _VOCABULARY - 10, _WORDS_PER_TEXT))


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Transformers:
    """Transformers with the same model. batch_size: prompts of a batch."""

    def __init__(self, folder: Path) -> None:
        model = transformers.SmolVLMForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        self._model = model.eval()
        self._processor = read_processor(folder, "smolvlm")
        self._processor.tokenizer.padding_side = "left"

    def answer(self, images: list[Image.Image], seed: int, num_tokens: int, batch_size: int) -> None:
        """Answer a question about each image."""
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            texts = [f"<image> {_words(seed + start + number)}" for number in range(len(batch))]
            given = self._processor(text=texts, images=[[one] for one in batch], return_tensors="pt", padding=True)
            with torch.no_grad():
                self._model.generate(**given, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)


class _Engines(NamedTuple):
    """Engines in turns: the multimodal model, its language model alone, and Transformers."""

    seeing: LLM
    alone: LLM
    reference: _Transformers


def run_turn(engines: _Engines, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of one turn, on prompts and images of its own."""
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    first = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    images = make_images(arguments.images, seed)

    def asked(image: Image.Image, number: int) -> Any:
        return {"prompt": f"<image> {_words(seed + number)}", "multi_modal_data": {"image": image}}

    def generate(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
        return _timed(lambda: llm.generate(prompts, params, use_tqdm=False))

    def answer(batch_size: int) -> float:
        return _timed(lambda: engines.reference.answer(images, seed, arguments.tokens, batch_size))

    (other_image,) = make_images(1, seed + 700)
    texts = [_words(seed + 500 + number) for number in range(arguments.images)]
    return {
        "penstock": generate(engines.seeing, [asked(image, number) for number, image in enumerate(images)], params),
        "transformers": min(map(answer, {4, arguments.images})),
        "first": generate(engines.seeing, [asked(other_image, 900)], first),
        "second": generate(engines.seeing, [asked(other_image, 901)], first),
        "texts": generate(engines.seeing, texts, params),
        "texts_alone": generate(engines.alone, texts, params),
    }


def measure(folder: Path, alone: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each turn; the first one warms up."""
    options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32}
    turns = []
    with LLM(str(folder), **options) as llm, LLM(str(alone), **options) as text_llm:
        engines = _Engines(llm, text_llm, _Transformers(folder))
        for turn in range(arguments.turns + 1):
            turns.append(run_turn(engines, 1000 * (turn + 1), arguments))
            print({name: round(seconds, 3) for name, seconds in turns[-1].items()}, flush=True)
    return {name: [turn[name] for turn in turns[1:]] for name in turns[0]}


def _ratios(results: dict[str, list[float]]) -> dict[str, list[float]]:
    def ratio(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(results[one], results[other], strict=True)]

    return {
        "times as fast as Transformers": ratio("transformers", "penstock"),
        "first token of a second question, times as fast": ratio("first", "second"),
        "texts, speed beside the language model alone": ratio("texts_alone", "texts"),
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Folder of the results as JSON")
    for name, default in (("turns", 5), ("images", 16), ("tokens", 64), ("layers", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = measure(*make_model(Path(name), arguments.layers), arguments)
    for what, values in _ratios(results).items():
        print(f"{what}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "multimodal.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
