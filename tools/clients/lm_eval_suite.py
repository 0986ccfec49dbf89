"""Runs lm-eval against `penstock serve`, and compares what it computes with Transformers.

    python -m tools.clients.lm_eval_suite

Tasks of choices and of whole texts go to `local-completions`, and answers to `local-chat-completions`. Log-likelihoods
must be those of the demo model in float32, and answers must be its greedy ones; the exit status is 1 otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.server_process import ServerProcess, serve_command
from tools.clients.environment import ROOT, client_python
from transformers import AutoModelForCausalLM, AutoTokenizer

_PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.24.0")
_MODEL = ROOT / "src" / "penstock" / "assets" / "demo"
_ENGINE = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--cpu-arithmetic", "float32")
_TOLERANCE = 1e-3
_MAX_TOKENS = 24
_STOP = "\n\n"
# Texts for choices and whole log-likelihoods, and questions.
_DOCUMENTS = [
    {"text": "ROMEO:\nBut, soft! what light", "choices": [" through yonder window breaks?", " in the", " zebra"]},
    {"text": "KING RICHARD III:", "choices": ["\nNow is the winter of our discontent", " A horse!", "é🦓"]},
    {"text": "First Citizen: ", "choices": ["Speak, speak.", "We are accounted poor citizens, the patricians good."]},
    {"text": "", "choices": ["To be, or not to be", "x"]},
]
_QUESTIONS = ["Who goes there?", "What is love?", "Speak of the king.", "Where is thy master, and what does he say?"]
_TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0},
    "texts": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}{{choices[0]}}", "doc_to_text": ""},
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "",
        "generation_kwargs": {"until": [_STOP], "max_gen_toks": _MAX_TOKENS, "do_sample": False},
    },
}


def write_tasks(folder: Path) -> None:
    """Write the tasks of this file for lm-eval's --include_path. YAML includes JSON."""
    for name, fields in _TASKS.items():
        documents = [{"text": text} for text in _QUESTIONS] if name == "answers" else _DOCUMENTS
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        metric = "word_perplexity" if name == "texts" else "exact_match" if name == "answers" else "acc"
        task = {
            "task": f"penstock_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            "metric_list": [{"metric": metric}],
            "target_delimiter": "",
            **fields,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def run_lm_eval(folder: Path, url: str, name: str, *, is_chat: bool) -> Iterator[tuple[list[Any], Any]]:
    """Arguments and result of every request of a task."""
    route, output = ("chat/completions" if is_chat else "completions"), folder / f"results_{name}_{is_chat}"
    model = {"model": "demo", "base_url": f"{url}/v1/{route}", "tokenizer": str(_MODEL), "num_concurrent": 2}
    if not is_chat:
        model |= {"tokenizer_backend": "huggingface", "max_length": 1024}
    command = [client_python("lm-eval", _PACKAGES), "-m", "lm_eval", "run"]
    command += ["--model", "local-chat-completions" if is_chat else "local-completions"]
    command += ["--model_args", json.dumps(model), "--tasks", f"penstock_{name}", "--include_path", str(folder)]
    command += ["--output_path", str(output), "--log_samples", *(["--apply_chat_template"] if is_chat else [])]
    variables = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | variables, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"lm-eval failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    (samples,) = output.rglob("samples_*.jsonl")
    lines = samples.read_text().splitlines()
    if not lines:
        sys.exit(f"lm-eval ran no request of {name}.")
    for sample in map(json.loads, lines):
        arguments = [list(given.values()) for given in sample["arguments"].values()]
        yield from zip(arguments, (one[0] for one in sample["resps"]), strict=True)


class Oracle:
    """The demo model in Transformers."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(_MODEL, trust_remote_code=False)
        self._model = AutoModelForCausalLM.from_pretrained(_MODEL, dtype=torch.float32, trust_remote_code=False).eval()

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-likelihood of the continuation, and whether it is the greedy one. An empty context is the BOS token."""
        if stripped := context[len(context.rstrip()) :]:
            context, continuation = context.rstrip(), stripped + continuation
        ids = self._ids(context + continuation)
        num_context = len(self._ids(context))
        if not context:
            ids, num_context = [self._tokenizer.bos_token_id, *ids], 1
        with torch.inference_mode():
            logprobs = self._model(torch.tensor([ids[:-1]])).logits[0, num_context - 1 :].log_softmax(-1)
        targets = torch.tensor(ids[num_context:])
        return logprobs.gather(1, targets[:, None]).sum().item(), bool((logprobs.argmax(-1) == targets).all())

    def answer(self, prompt: str) -> str:
        """Greedy answer up to the stop text."""
        ids = self._ids(prompt)
        output = self._model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=_MAX_TOKENS)
        text = self._tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return str(text).partition(_STOP)[0]

    def chat_prompt(self, messages: list[dict[str, Any]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def compare(folder: Path, url: str) -> Iterator[str]:
    """Differences between lm-eval's results and the oracle's."""
    oracle = Oracle()
    for (context, continuation), result in run_lm_eval(folder, url, "choices", is_chat=False):
        value, is_greedy = oracle.loglikelihood(context, continuation)
        print(f"choice   {float(result[0]):10.4f} {value:10.4f}  {context + continuation!r}")
        if abs(float(result[0]) - value) > _TOLERANCE or (result[1] in (True, "True")) != is_greedy:
            yield f"{context!r}, {continuation!r}: {result}, and ({value}, {is_greedy}) in Transformers"
    for (text,), result in run_lm_eval(folder, url, "texts", is_chat=False):
        value, _ = oracle.loglikelihood("", text)
        print(f"text     {float(result):10.4f} {value:10.4f}  {text!r}")
        if abs(float(result) - value) > _TOLERANCE:
            yield f"{text!r}: {result}, and {value} in Transformers"
    for is_chat in (False, True):
        for (prompt, _), result in run_lm_eval(folder, url, "answers", is_chat=is_chat):
            expected = oracle.answer(oracle.chat_prompt(json.loads(prompt[0])) if is_chat else prompt)
            print(f"{'chat' if is_chat else 'answer':<30}  {result!r}")
            if result != expected:
                yield f"{prompt!r}: {result!r}, and {expected!r} in Transformers"


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        with ServerProcess(serve_command("demo", *_ENGINE), folder / "server.log") as server:
            differences = list(compare(folder, server.url))
    print("\n".join(differences) or "All results are those of Transformers.")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
