"""GRPO with TRL on the CPU: the model that ships with Penstock learns to write more of one letter.

    python examples/training/grpo_trl.py --mode server
    python examples/training/grpo_trl.py --mode colocate --sleep

Needs TRL and vLLM's names beside Penstock: pip install trl==1.16.0 ./integrations/vllm-names

Rollouts come from `penstock serve` or from an engine in the trainer's process, to which each step sends new weights.
All is TRL's own, but for one client: TRL's exchange of weights with a server insists on CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from penstock.utils import get_open_port
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation
from vllm.distributed.weight_transfer.nccl_common import trainer_init

import penstock

DEMO = Path(penstock.__file__).parent / "assets" / "demo"
LETTER = "e"
PROMPTS = ["ROMEO:\n", "JULIET:\n", "First Citizen:\n", "KING RICHARD III:\n", "To be, or ", "O ", "My lord, ", "Who "]


def share_of_letter(completions: list[str], **_: Any) -> list[float]:
    """Reward of each completion: how much of it is the letter."""
    return [text.lower().count(LETTER) / max(1, len(text)) for text in completions]


class Client(vllm_client.VLLMClient):
    """TRL's client of a server, which sends weights from the CPU too: by gloo."""

    def init_communicator(self, device: Any = "cpu") -> None:
        info = {
            "master_address": "127.0.0.1",
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": self.get_world_size() + 1,
            "packed": True,
        }
        with ThreadPoolExecutor(max_workers=1) as threads:
            url = f"{self.base_url}/init_weight_transfer_engine"
            joined = threads.submit(self._post, url, json={"init_info": info})
            self.communicator = trainer_init(info)
            joined.result()


@contextlib.contextmanager
def server(model: Path) -> Iterator[str]:
    """URL of a server of a model that takes weights from programs of this machine."""
    port = get_open_port()
    options = ["--port", str(port), "--weight-transfer-config", json.dumps({"backend": "gloo"})]
    options += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--rl-routes-without-key"]
    options += ["--kv-cache-memory-bytes", "64MiB"]
    process = subprocess.Popen([sys.executable, "-m", "penstock.entrypoints.cli.main", "serve", str(model), *options])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def train(model: Path, *, num_steps: int, seed: int, **options: Any) -> list[dict[str, float]]:
    """Train a model; return the trainer's log of each step. options: of vLLM in `GRPOConfig`."""
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=num_steps,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=24,
            beta=0.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": torch.float32},
            use_vllm=True,
            **options,
        )
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=share_of_letter,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train()
        return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("server", "colocate"), default="colocate")
    parser.add_argument("--sleep", action="store_true", help="let the engine sleep while the trainer computes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # In the trainer's dtype: the engine keeps weights in that of the files, and would round others.
        model = Path(folder)
        AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).save_pretrained(model)
        AutoTokenizer.from_pretrained(DEMO).save_pretrained(model)
        if args.mode == "server":
            vllm_generation.VLLMClient = Client
            url = stack.enter_context(server(model))
            options: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": url}
            options["vllm_group_port"] = get_open_port()
        else:
            options = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": args.sleep}
            options |= {"vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 256}
        log = train(model, num_steps=args.steps, seed=args.seed, **options)
    rewards = [entry["reward"] for entry in log]
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in log]
    for step, (reward, difference) in enumerate(zip(rewards, differences, strict=True)):
        print(f"step {step:3}  reward {reward:.4f}  largest difference of log-probabilities {difference:.1e}")
    print(json.dumps({"rewards": rewards, "differences": differences}))


if __name__ == "__main__":
    main()
