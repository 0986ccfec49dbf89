"""Train the demo model, measure it, and write its folder: weights, tokenizer, chat template and model card."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from .calibration import write_calibration
from .dialogue import training_conversation
from .evaluate import evaluate
from .model import export
from .model_card import write_model_card
from .shakespeare import Corpus
from .tokenizer import save_tokenizer, train_tokenizer
from .train import Recipe, train

NUM_TOKENIZER_CONVERSATIONS = 3000


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    corpus: Path
    out: Path
    steps: int
    threads: int


def parse_arguments() -> Arguments:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model; made if it is missing")
    parser.add_argument("--steps", type=int, default=Recipe.num_steps, help="training steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return Arguments(**vars(parser.parse_args()))


def tokenizer_texts(plays: str, seed: int) -> list[str]:
    """Training texts of the tokenizer: the plays and a sample of conversations."""
    rng = Random(seed)
    conversations = [training_conversation(rng) for _ in range(NUM_TOKENIZER_CONVERSATIONS)]
    return [plays, *(message["content"] for messages in conversations for message in messages)]


def main() -> None:
    """Run everything from corpus to model card."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)  # attention makes many, and they are very slow
    recipe = replace(Recipe(), num_steps=arguments.steps)
    corpus = Corpus.read(arguments.corpus)

    tokenizer = train_tokenizer(tokenizer_texts(corpus.train, recipe.seed))
    model, record = train(corpus.train, tokenizer, recipe)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, arguments.out)
    export(model, tokenizer).save_pretrained(arguments.out)
    write_calibration(arguments.out, recipe.seed)
    print(f"trained in {record.seconds / 60:.1f} minutes; now measuring", flush=True)

    evaluation = evaluate(arguments.out, corpus.held_out)
    write_model_card(arguments.out, recipe, record, evaluation)
    print(f"loss {evaluation.nats_per_token:.3f} nats per token on held-out plays; wrote {arguments.out}")


if __name__ == "__main__":
    main()
