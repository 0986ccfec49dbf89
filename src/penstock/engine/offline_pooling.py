"""Pooling methods of the offline API: embeddings, classes, scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.config.vllm import also_from_vllm
from penstock.contract import PoolingParams
from penstock.engine.inputs.input_processor import PooledPrompt, located
from penstock.engine.inputs.pooling_prompts import (
    check_is_pooling_params,
    check_task,
    named_prompt,
    pairs_of,
    score_prompts,
)
from penstock.engine.inputs.prompts import (
    Prompt,
    Prompts,
    list_of_params,
    list_of_priorities,
    list_of_prompts,
    with_parts,
)
from penstock.engine.output import pooling_outputs as outputs
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.pair_scores import PairScores
from penstock.engine.session import Session
from penstock.errors import InvalidParameter
from penstock.features.lora.methods import AdapterMethods
from penstock.features.lora.request import LoRARequest, parts_of_adapter

_Result = TypeVar("_Result")


def with_adapters(prompts: Sequence[Prompt], adapters: Sequence[Any]) -> list[Prompt]:
    """Give each prompt its adapter. Raises InvalidParameter for what is no adapter."""
    adapted = []
    for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        with located(f"prompts[{index}]" if len(prompts) > 1 else ""):
            adapted.append(with_parts(prompt, parts_of_adapter(adapter)))
    return adapted


class PoolingMethods(AdapterMethods):
    """Methods of an offline engine that pools (`runner="pooling"`); an engine that generates refuses them.

    Arguments that the methods share:
    prompts: as of `LLM.generate`.
    pooling_params: one for all prompts, or one per prompt; None for those of the model.
    use_tqdm: show a progress bar, if standard error is a terminal.
    lora_request, priority: as of `LLM.generate`.
    All raise InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter, or for a task that the
    model cannot do, and RequestFailed, with the reason, where a request fails while it runs.
    """

    _session: Session

    @also_from_vllm
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
        prompt_name: str | None = None,
    ) -> list[outputs.EmbeddingRequestOutput]:
        """Embed texts; the outputs are in the prompts' order.

        prompt_name: prompt of the model's files that is put before each text; None takes the default one, if any.
        """
        pooling = check_task(self._session.model_config, "embed")
        prompt_list = [named_prompt(pooling, prompt, prompt_name) for prompt in list_of_prompts(prompts)]
        prompt_list = self._adapted(prompt_list, lora_request)
        return self._pool(prompt_list, pooling_params, "embed", outputs.as_embedding, use_tqdm, priority)

    @also_from_vllm
    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
    ) -> list[outputs.ClassificationRequestOutput]:
        """Classify texts: a probability per class, in the order of `id2label`."""
        check_task(self._session.model_config, "classify")
        prompt_list = self._adapted(list_of_prompts(prompts), lora_request)
        return self._pool(prompt_list, pooling_params, "classify", outputs.as_classification, use_tqdm, priority)

    @also_from_vllm
    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
    ) -> list[outputs.PoolingRequestOutput[outputs.PoolingOutput]]:
        """Pool texts by any of the model's tasks; the outputs have tensors.

        pooling_task: None takes that of each prompt's parameters, or the model's first.
        """
        check_task(self._session.model_config, pooling_task or getattr(pooling_params, "task", None))
        prompt_list = self._adapted(list_of_prompts(prompts), lora_request)
        return self._pool(prompt_list, pooling_params, pooling_task, outputs.as_pooling, use_tqdm, priority)

    @also_from_vllm
    def reward(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
    ) -> list[outputs.PoolingRequestOutput[outputs.PoolingOutput]]:
        """Rewards of each token, [T, number of rewards]: the task token_classify."""
        check_task(self._session.model_config, "token_classify")
        prompt_list = self._adapted(list_of_prompts(prompts), lora_request)
        return self._pool(prompt_list, pooling_params, "token_classify", outputs.as_pooling, use_tqdm, priority)

    @also_from_vllm
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        priority: Sequence[int] | int | None = None,
        chat_template: str | Path | None = None,
    ) -> list[outputs.ScoringRequestOutput]:
        """Score pairs of texts: one of `data_1` with each of `data_2`, or pair by pair.

        A cross-encoder reads both texts at once. Of an embedding model the score is the similarity of two embeddings,
        the cosine unless the checkpoint says otherwise; of a late-interaction model it is that of the texts' tokens
        (MaxSim).
        lora_request: adapter of all texts; none for models that read both at once.
        chat_template: of a reranker: a Jinja template whose messages have the roles "query" and "document".
        """
        pairs = pairs_of("data_1", data_1, "data_2", data_2)
        pooling = check_task(self._session.model_config, "score", "embed", "token_embed")
        if "score" in pooling.tasks:
            prompts = self._adapted(score_prompts(self._session.tokenizer, pairs, chat_template), lora_request)
            return self._pool(prompts, pooling_params, "score", outputs.as_score, use_tqdm, priority)
        if chat_template is not None:
            raise InvalidParameter("chat_template is for rerankers, and this model embeds each text. Leave it out.")
        task = PairScores.task(pooling)
        scores = PairScores(pooling, self._session.tokenizer, pairs, _with_task(pooling_params, task))
        prompts = self._adapted(scores.prompts, lora_request)
        return scores.scores(self._run(prompts, scores.params, task, use_tqdm, priority))

    def _adapted(self, prompts: Sequence[Prompt], lora_request: Any) -> list[Prompt]:
        """Load adapters, and give each prompt its own."""
        adapters = list_of_params("lora_requests", lora_request, len(prompts))
        adapted = with_adapters(prompts, adapters)
        self._add_adapters(adapters)
        return adapted

    def _pool(
        self,
        prompts: Sequence[Prompt],
        params: Any,
        task: str | None,
        make: Callable[[RequestOutput], _Result],
        use_tqdm: bool,
        priority: Any,
    ) -> list[_Result]:
        return [make(output) for output in self._run(prompts, params, task, use_tqdm, priority)]

    def _run(
        self, prompts: Sequence[Prompt], params: Any, task: str | None, use_tqdm: bool, priority: Any
    ) -> list[RequestOutput]:
        """Run one request per prompt; finished outputs in the prompts' order."""
        params_list = [_with_task(one, task) for one in list_of_params("pooling_params", params, len(prompts))]
        priorities = list_of_priorities(priority, len(prompts))
        items = [
            PooledPrompt(prompt, one, f"prompts[{index}]" if len(prompts) > 1 else "", priority=number)
            for index, (prompt, one, number) in enumerate(zip(prompts, params_list, priorities, strict=True))
        ]
        return self._session.finish(self._session.accept_pooled(items), shows_bar=use_tqdm)


def _with_task(params: Any, task: str | None) -> PoolingParams:
    """Parameters with the task; None leaves their own, or the model's first."""
    if params is None:
        return PoolingParams(task=task)
    check_is_pooling_params(params, task)
    cloned: PoolingParams = params.clone() if task is None else params.clone(task=task)
    return cloned
