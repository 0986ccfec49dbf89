"""The shipped EAGLE-3 head does what its card says, and the tool that made it counts drafts right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.kernels.sampling import draw_tokens_reference

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.train_eagle3.evaluate import Acceptance, acceptance, total
from tools.train_eagle3.head import AUX_LAYERS, export, load_head
from tools.train_eagle3.target import Target
from tools.train_eagle3.texts import Mix

DEMO = EngineConfig.create("demo").model.folder
FOLDER = DEMO.parent / "demo-eagle3"
METRICS = json.loads((FOLDER / "metrics.json").read_text())["evaluation"]
CONFIG = json.loads((FOLDER / "config.json").read_text())
HEADS, KV_HEADS, HEAD_DIM = (CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
# Of the prompts of each kind: every so manieth is checked.
EVERY = {"plays": 8, "chat": 4}


class Head:
    """The paper's head, a token at a time: no cache, one query. Entries are (embedding, hidden state) pairs."""

    def __init__(self) -> None:
        self.weights = load_file(FOLDER / "model.safetensors")
        self.target_ids = torch.arange(len(self.weights["d2t"])) + self.weights["d2t"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"].float())

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"].float()
        return x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt() * weight

    def step(self, entries: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The hidden state of the last entry, which sees all of them."""
        embedded, hidden = (torch.stack(column) for column in zip(*entries, strict=True))
        x = torch.cat([self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", hidden)], -1)
        heads = {
            name: self.linear(f"midlayer.self_attn.{name}_proj", x).view(len(entries), -1, HEAD_DIM) for name in "qkv"
        }
        q, k = (rotated(heads[name]) for name in "qk")
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, heads["v"]))
        weights = torch.einsum("hd,thd->ht", q[-1], k).div(HEAD_DIM**0.5).softmax(-1)
        mixed = torch.einsum("ht,thd->hd", weights, v).flatten()
        attended = hidden[-1] + self.linear("midlayer.self_attn.o_proj", mixed)
        normed = self.norm("midlayer.post_attention_layernorm", attended)
        gate, up = (self.linear(f"midlayer.mlp.{name}_proj", normed) for name in ("gate", "up"))
        return attended + self.linear("midlayer.mlp.down_proj", F.silu(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        logits = torch.full((CONFIG["vocab_size"],), float("-inf"))
        logits[self.target_ids] = self.linear("lm_head", self.norm("norm", hidden))
        return logits


def rotated(x_THD: Tensor) -> Tensor:
    frequencies = CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(len(x_THD)), frequencies).unsqueeze(1)
    first, second = x_THD.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def drawn(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    chosen = draw_tokens_reference(logits[None] / temperature, torch.tensor([seed]), torch.tensor([position]))
    return int(chosen.token_ids_R)


def accepted_first_drafts(
    head: Head, target: LlamaForCausalLM, ids: list[int], prompt_length: int, temperature: float, seed: int
) -> tuple[int, int]:
    """In how many rounds there was a draft, and in how many its first was accepted, drafting one token after another.

    ids: a prompt and the target's continuation.
    """
    layers = CONFIG["eagle_aux_hidden_state_layer_ids"]
    states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hidden_TD = head.linear("fc", torch.cat([states[layer][0] for layer in layers], -1))
    embedding = target.model.embed_tokens.weight
    num_rounds = num_accepted = 0
    place = prompt_length - 1
    while place + 2 < len(ids):
        entries = [(embedding[ids[i + 1]], hidden_TD[i]) for i in range(place + 1)]
        num_drafts = 0
        while num_drafts < METRICS["num_drafts"] and place + 2 + num_drafts < len(ids):
            hidden = head.step(entries)
            draft = drawn(head.logits(hidden), temperature, seed, place + 1 + num_drafts)
            if draft != ids[place + 2 + num_drafts]:
                break
            num_drafts += 1
            entries.append((embedding[draft], hidden))
        num_rounds += 1
        num_accepted += num_drafts > 0
        place += num_drafts + 1
    return num_rounds, num_accepted


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@torch.inference_mode()
@pytest.mark.parametrize("score", METRICS["scores"], ids=lambda score: f"{score['kind']}-{score['temperature']}")
@pytest.mark.one_case_quick
def test_the_first_draft_is_accepted_as_often_as_the_card_says(target: LlamaForCausalLM, score: dict[str, Any]) -> None:
    prompts = METRICS["prompts"][score["kind"]]
    chosen = range(0, len(prompts), EVERY[score["kind"]])
    temperature = score["temperature"]
    # In the arithmetic of the card, whose samples another one would not repeat.
    options = {"device": "cpu", "cpu_arithmetic": "float32", "num_threads": 1, "kv_cache_memory_bytes": 16 << 20}
    with LLM("demo", **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[i]} for i in chosen],
            [SamplingParams(temperature=temperature, seed=i, max_tokens=METRICS["new_tokens"]) for i in chosen],
            use_tqdm=False,
        )
    head = Head()
    counts = [
        accepted_first_drafts(
            head, target, prompts[i] + list(output.outputs[0].token_ids), len(prompts[i]), temperature, seed=i
        )
        for i, output in zip(chosen, outputs, strict=True)
    ]
    num_rounds, num_accepted = (sum(column) for column in zip(*counts, strict=True))
    stated = [score["of_prompts"][i] for i in chosen]
    stated_share = sum(part["num_accepted"][0] for part in stated) / sum(part["num_drafted"][0] for part in stated)
    assert num_accepted / num_rounds == pytest.approx(stated_share, abs=0.02)


def test_the_card_states_what_was_measured() -> None:
    card = (FOLDER / "README.md").read_text()
    for score in METRICS["scores"]:
        drafted, accepted = (
            [sum(counts) for counts in zip(*(part[name] for part in score["of_prompts"]), strict=True)]
            for name in ("num_drafted", "num_accepted")
        )
        temperature = score["temperature"] or "0 (greedy)"
        shares = " | ".join(f"{part / whole:.1%}" for part, whole in zip(accepted, drafted, strict=True))
        temperature = temperature if isinstance(temperature, str) else f"{temperature:g}"
        assert f"| {score['kind']} | {temperature} | {shares} | {1 + sum(accepted) / drafted[0]:.2f} |" in card
        if score["temperature"] == 0:
            assert accepted[0] / drafted[0] >= 0.6


def test_the_checkpoint_has_the_tensors_of_the_established_format() -> None:
    weights = load_file(FOLDER / "model.safetensors")
    target = json.loads((DEMO / "config.json").read_text())
    size, wide, inner = CONFIG["hidden_size"], 2 * CONFIG["hidden_size"], CONFIG["intermediate_size"]
    drafts, vocabulary = CONFIG["draft_vocab_size"], CONFIG["vocab_size"]
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, wide),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, wide),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, wide),
        "midlayer.self_attn.o_proj.weight": (size, HEADS * HEAD_DIM),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
        "lm_head.weight": (drafts, size),
        "d2t": (drafts,),
        "t2d": (vocabulary,),
    }
    assert CONFIG["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (size, vocabulary) == (target["hidden_size"], target["vocab_size"])
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert {weight.dtype for name, weight in weights.items() if name.endswith("weight")} == {torch.bfloat16}
    ids = torch.arange(drafts) + weights["d2t"]
    assert weights["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert ids.tolist() != list(range(drafts))
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 2_000_000


@torch.inference_mode()
def test_a_rollout_at_all_places_is_drafting_one_token_after_another_at_each(target: LlamaForCausalLM) -> None:
    rng, num_drafts, length = Random(5), 3, 12
    ids = torch.tensor([rng.choices(range(CONFIG["vocab_size"]), k=length + num_drafts) for _ in range(2)])
    embedded = target.model.embed_tokens(ids[:, 1:])
    aux = torch.randn(2, length, 3 * CONFIG["hidden_size"], generator=torch.Generator().manual_seed(5))
    chosen = torch.arange(1, length, 4)
    steps = list(load_head(FOLDER, target.config).rollout(aux, embedded, num_drafts, chosen))
    head = Head()
    hidden_BTD = head.linear("fc", aux)
    for row in range(2):
        for number, place in enumerate(chosen.tolist()):
            entries = [(embedded[row, i], hidden_BTD[row, i]) for i in range(place + 1)]
            for step, hidden_of_step in enumerate(steps):
                expected = head.step(entries)
                rolled_out = hidden_of_step[row, number if step else place]
                torch.testing.assert_close(rolled_out, expected, atol=2e-4, rtol=1e-4)
                entries.append((embedded[row, place + step + 1], expected))


def test_what_is_exported_is_the_shipped_checkpoint_again(target: LlamaForCausalLM, tmp_path: Path) -> None:
    export(load_head(FOLDER, target.config), tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    assert CONFIG["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
    assert CONFIG["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in AUX_LAYERS]


def test_the_tool_counts_as_it_did_for_the_card() -> None:
    """Of the first prompts only: seeds count from the first. Rounding differs between machines, so do a few draws."""
    tool_target = Target.load(DEMO)
    score = next(score for score in METRICS["scores"] if (score["kind"], score["temperature"]) == ("plays", 0.7))
    stated = total([Acceptance(**part) for part in score["of_prompts"][:6]])
    measured = total(
        acceptance(load_head(FOLDER, tool_target.model.config), tool_target, METRICS["prompts"]["plays"][:6], 0.7)
    )
    assert measured.num_drafted == pytest.approx(stated.num_drafted, abs=5)
    assert measured.num_accepted == pytest.approx(stated.num_accepted, abs=5)


def test_counts_of_prompts_add_up_by_position() -> None:
    whole = total([Acceptance([4, 3], [2, 1]), Acceptance([1, 1], [1, 0])])
    assert whole == Acceptance([5, 4], [3, 1])
    assert whole.shares == [0.6, 0.25]
    assert whole.tokens_per_round == 1.8


def test_a_mix_gives_whole_rows_and_always_one_of_plays() -> None:
    assert Mix(0.125, 0.375, 0.5).shares_of(8) == (1, 3, 4)
    assert Mix(0.01, 0.5, 0.49).shares_of(2) == (1, 1, 0)
