"""Prompts with images beside Transformers, in turns, and what images cost a text model.

    python -m benchmarks.multimodal --output FOLDER [--turns 5] [--images 16] [--tokens 64] [--layers 30]
        [--dtype float32] [--model smolvlm]

A random model of SmolVLM-256M's shape answers a question about each of 16 images of 512 x 512 pixels, each in one tile
of 64 tokens; --model qwen2.5-vl has the encoder of Qwen2.5-VL-3B, 324 tokens for each, and its language model with
fewer layers. Penstock runs the requests together; Transformers in left-padded batches of 16, or of 4 if that is faster
in the first turn. Measured besides: the first token of a second question about the same image beside that of the first
one, and texts alone on this model beside the language model saved by itself. Medians over the turns; both run with all
cores, one after the other in each turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
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
_IMAGE_SIZE, _ROWS = 512, 64
_WORDS_PER_TEXT = 32


class _Shape(NamedTuple):
    """A model of images. special: tokens, the image's first. prompt: with an image.

    make: returns a random model, its language model alone, and files of the processor; takes the number of layers and
    the number of the image's token.
    """

    model_type: str
    special: tuple[str, ...]
    prompt: str
    make: Callable[[int, int], tuple[Any, Any, dict[str, dict[str, Any]]]]


def _smolvlm(num_layers: int, image_id: int) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
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
    config = transformers.SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=4,
        image_token_id=image_id,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    model = transformers.SmolVLMForConditionalGeneration(config)
    alone = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    alone.model.load_state_dict(model.model.text_model.state_dict())
    images = {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": _IMAGE_SIZE},
        "max_image_size": {"longest_edge": _IMAGE_SIZE},
    }
    return model, alone, {"preprocessor_config": images, "processor_config": {"image_seq_len": _ROWS}}


def _qwen25_vl(num_layers: int, image_id: int) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    text = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": _VOCABULARY - 10,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=image_id,
        vision_start_token_id=image_id + 1,
        vision_end_token_id=image_id + 2,
        video_token_id=image_id + 3,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    alone = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    alone.model.load_state_dict(model.model.language_model.state_dict())
    return model, alone, {"preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}}


SHAPES = {
    "smolvlm": _Shape(
        "smolvlm",
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
        "<image>",
        _smolvlm,
    ),
    "qwen2.5-vl": _Shape(
        "qwen2_5_vl",
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        "<|vision_start|> <|image_pad|> <|vision_end|>",
        _qwen25_vl,
    ),
}


def make_model(folder: Path, shape: _Shape, num_layers: int, dtype: torch.dtype) -> tuple[Path, Path]:
    """Write the multimodal model, and its language model alone; returns their folders."""
    image_id = _VOCABULARY - len(shape.special)
    torch.manual_seed(0)
    model, language_model, files = shape.make(num_layers, image_id)
    seeing, alone = folder / "seeing", folder / "alone"
    for place, made in ((seeing, model), (alone, language_model)):
        made.to(dtype).save_pretrained(place)
        _write_tokenizer(place, shape, image_id)
    for name, fields in files.items():
        (seeing / f"{name}.json").write_text(json.dumps(fields))
    return seeing, alone


def _write_tokenizer(folder: Path, shape: _Shape, first_special: int) -> None:
    vocabulary = {f"w{number}": number for number in range(first_special)}
    vocabulary |= {token: first_special + number for number, token in enumerate(shape.special)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", additional_special_tokens=list(shape.special)
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
    """Transformers with the same model. sizes: of batches, from which the first turn chooses one."""

    def __init__(self, folder: Path, shape: _Shape, dtype: torch.dtype, sizes: set[int]) -> None:
        self._sizes = sizes
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False
        )
        self._model = model.eval()
        self._prompt = shape.prompt
        self._processor = read_processor(folder, shape.model_type)
        self._processor.tokenizer.padding_side = "left"

    def seconds(self, images: list[Image.Image], seed: int, num_tokens: int) -> float:
        """Seconds for a question about each image, in batches of the better size."""
        taken = {size: _timed(partial(self._answer, images, seed, num_tokens, size)) for size in self._sizes}
        self._sizes = {min(taken, key=lambda size: taken[size])}
        return min(taken.values())

    def _answer(self, images: list[Image.Image], seed: int, num_tokens: int, batch_size: int) -> None:
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            texts = [f"{self._prompt} {_words(seed + start + number)}" for number in range(len(batch))]
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
    prompt = SHAPES[arguments.model].prompt
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    first = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    images = make_images(arguments.images, seed)

    def asked(image: Image.Image, number: int) -> Any:
        return {"prompt": f"{prompt} {_words(seed + number)}", "multi_modal_data": {"image": image}}

    def generate(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
        return _timed(lambda: llm.generate(prompts, params, use_tqdm=False))

    (other_image,) = make_images(1, seed + 700)
    texts = [_words(seed + 500 + number) for number in range(arguments.images)]
    return {
        "penstock": generate(engines.seeing, [asked(image, number) for number, image in enumerate(images)], params),
        "transformers": engines.reference.seconds(images, seed, arguments.tokens),
        "first": generate(engines.seeing, [asked(other_image, 900)], first),
        "second": generate(engines.seeing, [asked(other_image, 901)], first),
        "texts": generate(engines.seeing, texts, params),
        "texts_alone": generate(engines.alone, texts, params),
    }


def measure(folder: Path, alone: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each turn; the first one warms up."""
    dtype = getattr(torch, arguments.dtype)
    options = {"dtype": arguments.dtype, "max_model_len": 1024, "max_num_seqs": 32}
    turns = []
    with LLM(str(folder), **options) as llm, LLM(str(alone), **options) as text_llm:
        engines = _Engines(llm, text_llm, _Transformers(folder, SHAPES[arguments.model], dtype, {4, arguments.images}))
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
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", choices=tuple(SHAPES), default="smolvlm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shape, dtype = SHAPES[arguments.model], getattr(torch, arguments.dtype)
        results = measure(*make_model(Path(name), shape, arguments.layers, dtype), arguments)
    for what, values in _ratios(results).items():
        print(f"{what}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "multimodal.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
