"""Programs that import vLLM's names, with Penstock under these: lm-eval, and TRL's GRPO."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.clients.environment import ROOT, trainer_python
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = ROOT / "src" / "penstock" / "assets" / "demo"
TEXTS = [("ROMEO:\nBut, soft! what light", " through yonder window breaks?"), ("First Citizen:", "\nSpeak, speak.")]
LM_EVAL = f"""
import json
from lm_eval.api.instance import Instance
from lm_eval.models.vllm_causallms import VLLM

lm = VLLM(pretrained={str(DEMO)!r}, dtype="float32", max_gen_toks=8, gpu_memory_utilization=0.1, max_num_seqs=4)
asked = [Instance("loglikelihood", {{}}, text, number) for number, text in enumerate({TEXTS!r})]
until = {{"until": ["\\n\\n"], "max_gen_toks": 8, "do_sample": False}}
generated = [Instance("generate_until", {{}}, (text, until), number) for number, (text, _) in enumerate({TEXTS!r})]
chat = lm.apply_chat_template([{{"role": "user", "content": "Hi"}}])
print(json.dumps([lm.loglikelihood(asked), lm.generate_until(generated), lm.max_length, chat]))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return trainer_python()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"lm-eval and TRL cannot be installed here: {error}")


def last_line(command: list[Any], timeout_s: float) -> Any:
    """The last line of a program's output, as data."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_lm_evals_model_has_the_log_likelihoods_of_transformers(python: Path) -> None:
    likelihoods, generated, max_length, chat = last_line([python, "-c", LM_EVAL], 280)
    tokenizer = AutoTokenizer.from_pretrained(DEMO, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, trust_remote_code=False)
    assert (max_length, len(generated)) == (1024, len(TEXTS))
    assert chat == tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    for (context, continuation), (value, _) in zip(TEXTS, likelihoods, strict=True):
        # The tokenizer puts its BOS token before a text.
        prompt, whole = (tokenizer(text).input_ids for text in (context, context + continuation))
        with torch.inference_mode():
            logprobs = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        targets = torch.tensor(whole[len(prompt) :])
        assert value == pytest.approx(logprobs.gather(1, targets[:, None]).sum().item(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [("colocate",), ("colocate", "--sleep"), ("server",)], ids=" ".join)
def test_grpo_learns_from_rollouts_that_are_the_trainers(python: Path, mode: tuple[str, ...]) -> None:
    example = ROOT / "examples" / "training" / "grpo_trl.py"
    log = last_line([python, example, "--mode", *mode], 1700)
    assert len(log["rewards"]) == 20
    assert sum(log["rewards"][-3:]) > 6 * log["rewards"][0]
    assert max(log["differences"]) < 1e-3
