"""Train the demo model's EAGLE-3 head, measure it, and write its folder: weights, configuration and card."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tools.train_demo.shakespeare import Corpus

from .evaluate import evaluate
from .head import export
from .model_card import write_model_card
from .target import Target
from .train import Recipe, train


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    corpus: Path
    target: Path
    out: Path
    steps: int
    threads: int


def parse_arguments() -> Arguments:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_eagle3", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument("--target", type=Path, default=Path("src/penstock/assets/demo"), help="the demo model's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head; made if it is missing")
    parser.add_argument("--steps", type=int, default=Recipe.num_steps, help="training steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return Arguments(**vars(parser.parse_args()))


def main() -> None:
    """Run everything from corpus to card."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)  # attention makes many, and they are very slow
    recipe = replace(Recipe(), num_steps=arguments.steps)
    corpus = Corpus.read(arguments.corpus)
    target = Target.load(arguments.target)

    head, record = train(corpus.train, target, recipe)
    arguments.out.mkdir(parents=True, exist_ok=True)
    export(head, arguments.out)
    print(f"trained in {record.seconds / 60:.1f} minutes; now measuring", flush=True)

    evaluation = evaluate(arguments.out, target, corpus.held_out)
    write_model_card(arguments.out, target.model.config, recipe, record, evaluation)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
