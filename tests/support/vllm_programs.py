"""Scripts from vLLM's documentation and common tutorials, except for the model's name.

RUNNING leave something in `result`, and assert what their readers would see. REFUSED are by the feature that they ask
for. What is asked for by a command line is in COMMANDS.
"""

from __future__ import annotations

RUNNING = {
    "quickstart": """
        from vllm import LLM, SamplingParams

        prompts = [
            "Hello, my name is",
            "The president of the United States is",
            "The capital of France is",
            "The future of AI is",
        ]
        sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

        def main():
            llm = LLM(model="demo")
            outputs = llm.generate(prompts, sampling_params)
            for output in outputs:
                prompt = output.prompt
                generated_text = output.outputs[0].text
                print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
            assert [output.prompt for output in outputs] == prompts
            return outputs

        if __name__ == "__main__":
            result = main()
    """,
    "options of a GPU": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", tensor_parallel_size=1, gpu_memory_utilization=0.95, dtype="float", enforce_eager=True,
                  trust_remote_code=True, swap_space=4, disable_log_stats=True, max_num_seqs=8, seed=0,
                  enable_chunked_prefill=True, compilation_config={"level": 0}, tokenizer_mode="auto")
        result = [llm.generate("Hello", SamplingParams(max_tokens=4))]
        llm.close()
    """,
    "a shorter context": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", tokenizer="demo", max_model_len=512, gpu_memory_utilization=0.9, max_num_seqs=16,
                  max_num_batched_tokens=512, load_format="auto", revision=None, quantization=None)
        result = llm.generate(["Hello"], SamplingParams(temperature=0.7, top_k=50, max_tokens=8), use_tqdm=False)
    """,
    "dtypes of torch": """
        import torch
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", dtype=torch.bfloat16, max_model_len=256, kv_cache_memory_bytes=16 << 20)
        result = llm.generate("Hello", SamplingParams(max_tokens=4))
    """,
    "token ids and log-probabilities": """
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt
        llm = LLM(model="demo")
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, stop=None, seed=None)
        outputs = llm.generate([TokensPrompt(prompt_token_ids=[1, 5, 9])], params, use_tqdm=False)
        assert outputs[0].prompt_token_ids == [1, 5, 9]
        result = [outputs[0].outputs[0].logprobs[0]]
    """,
    "log-probabilities of outputs": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4, logprobs=5))[0]
        completion = output.outputs[0]
        chosen = []
        for token_id, candidates in zip(completion.token_ids, completion.logprobs):
            assert len(candidates) == 5 and candidates[token_id].rank == 1
            for candidate, logprob in candidates.items():
                print(candidate, logprob.decoded_token, logprob.logprob, logprob.rank)
            chosen.append(candidates[token_id].logprob)
        assert abs(completion.cumulative_logprob - sum(chosen)) < 1e-6
        result = chosen
    """,
    "the likelihood of a prompt": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        sampling_params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        output = llm.generate(["To be, or not to be"], sampling_params)[0]
        assert output.prompt_logprobs[0] is None
        total = 0.0
        for token_id, logprobs in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
            total += logprobs[token_id].logprob
        assert total < 0
        result = [total]
    """,
    "how outputs end": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        first = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
        assert (first.finish_reason, first.stop_reason) == ("length", None)
        word = first.text.split()[1]
        stopped = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=16, stop=[word]))[0].outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
        assert word not in stopped.text
        token = first.token_ids[2]
        by_token = llm.generate("ROMEO:", SamplingParams(temperature=0, stop_token_ids=[token]))[0].outputs[0]
        assert by_token.stop_reason == token
        kept = SamplingParams(temperature=0, max_tokens=16, stop=word, include_stop_str_in_output=True)
        assert llm.generate("ROMEO:", kept)[0].outputs[0].text.endswith(word)
        result = [first.index, first.text]
    """,
    "several outputs": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        params = SamplingParams(n=3, temperature=1.0, top_p=0.9, seed=42, max_tokens=6, logprobs=0)
        outputs = llm.generate("ROMEO:", params)[0].outputs
        assert [output.index for output in outputs] == [0, 1, 2]
        best = max(outputs, key=lambda output: output.cumulative_logprob)
        again = llm.generate("ROMEO:", params)[0].outputs
        assert [output.text for output in again] == [output.text for output in outputs]
        result = [best.text]
    """,
    "parameters per prompt": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        prompts = ["Hello, my name is", "The capital of France is"]
        params = [SamplingParams(temperature=0.0, max_tokens=2), SamplingParams(temperature=0.9, max_tokens=5)]
        result = llm.generate(prompts, params)
        assert [len(output.outputs[0].token_ids) for output in result] == [2, 5]
    """,
    "choices of tokens": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        tokenizer = llm.get_tokenizer()
        yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in (" yes", " no"))
        allowed = SamplingParams(max_tokens=3, allowed_token_ids=[yes, no], ignore_eos=True)
        assert set(llm.generate("Is it?", allowed)[0].outputs[0].token_ids) <= {yes, no}
        biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={no: 100.0}, min_tokens=3)
        assert llm.generate("Is it?", biased)[0].outputs[0].token_ids == [no] * 3
        without = SamplingParams(max_tokens=8, bad_words=["the"], repetition_penalty=1.1, frequency_penalty=0.5)
        result = llm.generate("Is it?", without)
        assert "the" not in result[0].outputs[0].text.split()
    """,
    "arguments without use": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", enable_lora=False, speculative_config=None, quantization=None)
        params = SamplingParams(max_tokens=4, structured_outputs=None, skip_clone=True)
        result = llm.generate("Hello", params, lora_request=None, priority=None, tokenization_kwargs=None)
        result += llm.generate(prompts=["Hello"], sampling_params=[params])
    """,
    "beam search": """
        from vllm import LLM
        from vllm.sampling_params import BeamSearchParams
        llm = LLM(model="demo")
        params = BeamSearchParams(beam_width=4, max_tokens=5)
        outputs = llm.beam_search([{"prompt": "Hello, my name is"}, {"prompt": "The capital is"}], params)
        for output in outputs:
            assert len(output.sequences) == 4
            scores = [sequence.cum_logprob / len(sequence.tokens) for sequence in output.sequences]
            assert scores == sorted(scores, reverse=True)
            generated_text = output.sequences[0].text
            print(f"Generated text: {generated_text!r}, tokens: {output.sequences[0].tokens}")
        result = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
    """,
    "chat": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        sampling_params = SamplingParams(temperature=0.5, max_tokens=8)
        conversation = [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello! How can I assist you today?"},
            {"role": "user", "content": "Write an essay about the importance of higher education."},
        ]
        outputs = llm.chat(conversation, sampling_params=sampling_params, use_tqdm=False)
        for output in outputs:
            print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
        assert "higher education" in outputs[0].prompt
        result = outputs
    """,
    "a batch of chats": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        conversation = [{"role": "user", "content": "What is 47 + 38?"}]
        conversations = [conversation for _ in range(10)]
        outputs = llm.chat(messages=conversations, sampling_params=SamplingParams(temperature=0), use_tqdm=True)
        assert len(outputs) == 10 and len({output.outputs[0].text for output in outputs}) == 1
        result = outputs
    """,
    "a chat in parts, with a template": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\\n{% endfor %}"
        messages = [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
        result = llm.chat(messages, SamplingParams(max_tokens=4), chat_template=chat_template,
                          add_generation_prompt=False, chat_template_content_format="auto", tools=None)
        assert result[0].prompt == "user: Who are you?\\n"
    """,
    "an answer that is begun": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        messages = [{"role": "user", "content": "What is 47 + 38?"}, {"role": "assistant", "content": "It is"}]
        result = llm.chat(messages, SamplingParams(max_tokens=4), add_generation_prompt=False,
                          continue_final_message=True)
        assert result[0].prompt.endswith("It is")
    """,
    "the tokenizer's chat template": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        tokenizer = llm.get_tokenizer()
        messages = [{"role": "user", "content": "What is 47 + 38?"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[tokenizer.eos_token_id])
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        result = llm.generate([{"prompt_token_ids": token_ids}], params)
        assert result[0].outputs[0].text == llm.chat(messages, params)[0].outputs[0].text
    """,
    "what a tokenizer does": """
        from vllm import LLM
        llm = LLM(model="demo")
        tokenizer = llm.get_tokenizer()
        input_ids = tokenizer("Hello world")["input_ids"]
        assert tokenizer.decode(input_ids, skip_special_tokens=True) == "Hello world"
        assert len(tokenizer) >= tokenizer.vocab_size > max(input_ids)
        assert tokenizer.batch_decode([input_ids], skip_special_tokens=True) == ["Hello world"]
        padded = tokenizer(["a", "a b c"], truncation=True, max_length=16)
        result = tokenizer.convert_ids_to_tokens(input_ids) + padded.input_ids
    """,
    "a model's own defaults": """
        from vllm import LLM
        llm = LLM(model="demo", generation_config="auto")
        sampling_params = llm.get_default_sampling_params()
        sampling_params.max_tokens = 4
        sampling_params.temperature = 0.5
        sampling_params.top_p = 0.9
        outputs = llm.generate(["Hello, my name is"], sampling_params)
        assert len(outputs[0].outputs[0].token_ids) == 4
        assert llm.get_default_sampling_params().max_tokens != 4
        result = outputs
    """,
    "defaults of the engine": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", generation_config="vllm", override_generation_config={"temperature": 0.6})
        assert llm.get_default_sampling_params().temperature == 0.6
        params = SamplingParams.from_optional(temperature=None, max_tokens=3)
        copied = params.clone()
        copied.max_tokens = 2
        assert (params.temperature, params.max_tokens) == (1.0, 3)
        result = llm.generate("Hello") + llm.generate("Hello", copied)
    """,
    "a prefix that is shared": """
        import time
        from vllm import LLM, SamplingParams
        prefix = "You are an expert school principal, skilled in managing staff. " * 8
        prompts = [prefix + rest for rest in ("Hello, my name is", "The capital is", "The future is")]
        sampling_params = SamplingParams(temperature=0.0, max_tokens=4)
        regular_llm = LLM(model="demo", gpu_memory_utilization=0.4, enable_prefix_caching=False)
        expected = [output.outputs[0].text for output in regular_llm.generate(prompts, sampling_params)]
        del regular_llm
        llm = LLM(model="demo", enable_prefix_caching=True, gpu_memory_utilization=0.4)
        llm.generate(prompts[0], sampling_params)
        start_time = time.time()
        outputs = llm.generate(prompts, sampling_params)
        print(f"Took {time.time() - start_time:.2f} s")
        assert [output.outputs[0].text for output in outputs] == expected
        assert all(output.num_cached_tokens > 0 for output in outputs)
        assert llm.reset_prefix_cache()
        result = outputs
    """,
    "tokens per second": """
        import time
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo")
        sampling_params = SamplingParams(temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=8, detokenize=False)
        prompts = [{"prompt_token_ids": [index + 5] * 12} for index in range(6)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        total = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs)
        print(f"{len(prompts) / elapsed:.2f} requests/s, {total / elapsed:.2f} tokens/s")
        assert total == 6 * (12 + 8)
        result = outputs
    """,
    "priorities": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", scheduling_policy="priority", max_model_len=256)
        result = llm.generate(["Hello", "Good bye"], SamplingParams(max_tokens=2), priority=[1, 0])
    """,
    "the model itself": """
        from vllm import LLM
        llm = LLM(model="demo")
        names = llm.apply_model(lambda model: type(model).__name__)
        result = names
        assert names == ["LlamaForCausalLM"]
    """,
    "metrics of a request": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", disable_log_stats=False)
        metrics = llm.generate("Hello", SamplingParams(max_tokens=3))[0].metrics
        assert metrics.first_token_time >= metrics.arrival_time
        result = [metrics.finished_time - metrics.arrival_time]
    """,
    "metrics of an engine": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", disable_log_stats=False)
        llm.generate("Hello", SamplingParams(max_tokens=3))
        result = {metric.name.split(":")[1]: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert result["generation_tokens"] >= 3
    """,
    "memory that is given back": """
        import gc
        import torch
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", max_model_len=128)
        result = llm.generate("Hello", SamplingParams(max_tokens=2))
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    """,
    "an asynchronous engine": """
        import asyncio
        from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
        async def main():
            engine_args = AsyncEngineArgs(model="demo", max_model_len=256, enforce_eager=True, disable_log_stats=True)
            engine = AsyncLLMEngine.from_engine_args(engine_args)
            params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=1)
            results_generator = engine.generate("Hello, my name is", params, "request-0")
            final_output, lengths = None, []
            async for request_output in results_generator:
                final_output = request_output
                lengths.append(len(request_output.outputs[0].token_ids))
            assert final_output.finished and lengths == sorted(lengths) and lengths[-1] == 8
            text = ""
            deltas = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=1)
            from vllm.sampling_params import RequestOutputKind
            deltas = deltas.clone()
            deltas.output_kind = RequestOutputKind.DELTA
            async for output in engine.generate(request_id="request-1", prompt="Hello, my name is",
                                                sampling_params=deltas):
                for completion in output.outputs:
                    text += completion.text
                if output.finished:
                    break
            assert text == final_output.outputs[0].text
            finals = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
            outputs = [output async for output in engine.generate("Hello", finals, request_id="request-2")]
            assert len(outputs) == 1
            engine.shutdown()
            return text
        result = asyncio.run(main())
    """,
    "an asynchronous engine with many callers": """
        import asyncio
        import uuid
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        async def generate(engine, prompt):
            count = 0
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            async for output in engine.generate(prompt, params, str(uuid.uuid4()), lora_request=None, priority=0):
                count = len(output.outputs[0].token_ids)
            return count
        async def aborted(engine):
            stream = engine.generate("Hello", SamplingParams(max_tokens=200, ignore_eos=True), request_id="long")
            async for output in stream:
                if not output.finished:
                    await engine.abort("long")
                last = output
            return last.outputs[0].finish_reason
        async def main():
            engine_args = AsyncEngineArgs(model="demo", max_model_len=256)
            engine = AsyncLLM.from_engine_args(engine_args, start_engine_loop=True, usage_context=None)
            try:
                await engine.check_health()
                counts = await asyncio.gather(*(generate(engine, f"Number {index}") for index in range(4)))
                assert counts == [4] * 4
                assert await aborted(engine) == "abort"
                tokenizer = engine.get_tokenizer()
                return tokenizer.encode("Hello")
            finally:
                engine.shutdown(timeout=None)
        result = asyncio.run(main())
    """,
    "features that may be there": """
        from vllm import LLM
        llm = LLM(model="demo")
        result = [name for name in ("generate", "embed", "sleep", "checkpoint_prepare") if hasattr(llm, name)]
        assert result == ["generate", "embed", "sleep"]
    """,
    "an engine that sleeps": """
        from vllm import LLM, SamplingParams
        llm = LLM(model="demo", enable_sleep_mode=True)
        params = SamplingParams(temperature=0, max_tokens=4)
        before = llm.generate("Hello", params)[0].outputs[0].token_ids
        llm.sleep(level=1)
        llm.wake_up()
        llm.sleep(level=2, mode="abort")
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        result = llm.generate("Hello", params)[0].outputs[0].token_ids
        assert list(result) == list(before)
    """,
    "an engine step by step": """
        import argparse
        from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        def create_test_prompts() -> list[tuple[str, SamplingParams]]:
            return [
                ("A robot may not injure", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
                ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
                ("What is the meaning?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
            ]

        def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams]]):
            request_id, finished = 0, []
            while test_prompts or engine.has_unfinished_requests():
                if test_prompts:
                    prompt, sampling_params = test_prompts.pop(0)
                    engine.add_request(str(request_id), prompt, sampling_params)
                    request_id += 1
                request_outputs: list[RequestOutput] = engine.step()
                finished += [output for output in request_outputs if output.finished]
            return finished

        def initialize_engine(args: argparse.Namespace) -> LLMEngine:
            engine_args = EngineArgs.from_cli_args(args)
            return LLMEngine.from_engine_args(engine_args)

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="steps"))
        args = parser.parse_args(["--model", "demo", "--max-model-len", "64", "--gpu_memory_utilization=0.4"])
        result = process_requests(initialize_engine(args), create_test_prompts())
        assert sorted((output.request_id, len(output.outputs)) for output in result) == [("0", 1), ("1", 1), ("2", 2)]
    """,
    "adapters step by step": """
        import json, tempfile
        from pathlib import Path
        import torch
        from safetensors.torch import save_file
        from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
        from vllm.lora.request import LoRARequest

        def snapshot_download() -> str:  # of huggingface_hub
            folder, layer = tempfile.mkdtemp(), "base_model.model.model.layers.0.self_attn.o_proj"
            config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
            tensors = {f"{layer}.lora_A.weight": torch.ones(2, 192), f"{layer}.lora_B.weight": torch.ones(192, 2)}
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            return folder

        engine_args = EngineArgs(model="demo", enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2,
                                 max_num_seqs=256)
        engine = LLMEngine.from_engine_args(engine_args)
        lora_path = snapshot_download()
        sampling_params = SamplingParams(temperature=0.0, logprobs=1, max_tokens=8)
        test_prompts = [
            ("A robot may not injure a human being", sampling_params, None),
            ("A robot may not injure a human being", sampling_params, LoRARequest("sql-lora", 1, lora_path)),
            ("A robot may not injure a human being", sampling_params, LoRARequest("sql-lora2", 2, lora_path)),
        ]
        request_id, texts = 0, {}
        while test_prompts or engine.has_unfinished_requests():
            if test_prompts:
                prompt, sampling_params, lora_request = test_prompts.pop(0)
                engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
                request_id += 1
            request_outputs: list[RequestOutput] = engine.step()
            texts |= {output.request_id: output.outputs[0].text for output in request_outputs if output.finished}
        assert texts["0"] != texts["1"] == texts["2"]
        result = texts
    """,
    "arguments of a script": """
        from vllm import LLM, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        def create_parser():
            parser = FlexibleArgumentParser()
            engine_group = parser.add_argument_group("Engine arguments")
            EngineArgs.add_cli_args(engine_group)
            engine_group.set_defaults(model="demo")
            sampling_group = parser.add_argument_group("Sampling parameters")
            sampling_group.add_argument("--max-tokens", type=int)
            sampling_group.add_argument("--temperature", type=float)
            return parser

        args = vars(create_parser().parse_args(["--max_tokens", "3"]))
        max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
        llm = LLM(**args)
        sampling_params = llm.get_default_sampling_params()
        if max_tokens is not None:
            sampling_params.max_tokens = max_tokens
        if temperature is not None:
            sampling_params.temperature = temperature
        result = llm.generate(["Hello, my name is"], sampling_params)
        assert len(result[0].outputs[0].token_ids) == 3
    """,
    "structured output": """
        from enum import Enum
        from pydantic import BaseModel
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        llm = LLM(model="demo")
        choice = StructuredOutputsParams(choice=["Positive", "Negative"])
        outputs = llm.generate("Classify this: wonderful!", SamplingParams(structured_outputs=choice))
        assert outputs[0].outputs[0].text in ("Positive", "Negative")
        regex = StructuredOutputsParams(regex=r"\\w{1,8}@\\w{1,8}\\.com\\n")
        params = SamplingParams(structured_outputs=regex, stop=["\\n"], max_tokens=50)
        assert "@" in llm.generate("An address:", params)[0].outputs[0].text

        class CarType(str, Enum):
            SEDAN = "SEDAN"
            SUV = "SUV"

        class CarDescription(BaseModel):
            fast: bool
            car_type: CarType

        CarDescription.model_rebuild(_types_namespace={"CarType": CarType})
        schema = StructuredOutputsParams(json=CarDescription.model_json_schema())
        outputs = llm.generate("A car as JSON:", SamplingParams(structured_outputs=schema, max_tokens=100))
        result = CarDescription.model_validate_json(outputs[0].outputs[0].text)
    """,
    "embeddings": """
        from vllm import LLM, EngineArgs, PoolingParams
        from vllm.config import PoolerConfig
        llm = LLM(model="demo", runner="pooling", convert="embed", enforce_eager=True,
                  pooler_config=PoolerConfig(pooling_type="MEAN", normalize=True))
        outputs = llm.embed(["Hello, my name is", "The capital of France is"])
        for output in outputs:
            embeds = output.outputs.embedding
            print(f"{embeds[:4]} (size={len(embeds)})")
        result = [sum(value * value for value in output.outputs.embedding) for output in outputs]
        assert all(abs(norm - 1) < 1e-3 for norm in result)
    """,
    "one import for all": """
        import vllm
        llm = vllm.LLM("demo", max_model_len=-1, model_impl="vllm", worker_extension_cls="")
        result = llm.generate(vllm.TextPrompt(prompt="Hello"), vllm.SamplingParams(max_tokens=2))
    """,
}

REFUSED = {
    "choosing parts of what a sleeping engine keeps": [
        """
        from vllm import LLM
        LLM(model="demo", enable_nccl_comm_suspend=True)
        """,
        """
        from vllm import LLM
        LLM(model="demo").release_kv_cache_memory()
        """,
    ],
    "expert parallelism, several nodes and external load balancers": [
        """
        from vllm import LLM
        LLM(model="demo", data_parallel_size=2, enable_expert_parallel=True)
        """,
    ],
    "other quantization methods": [
        """
        from vllm import LLM
        LLM(model="demo", quantization="fp8")
        """,
        """
        import torch
        from vllm import LLM
        LLM(model="demo", dtype=torch.bfloat16, quantization="bitsandbytes")
        """,
    ],
    "scales of FP8 ones": [
        """
        from vllm import LLM
        LLM(model="demo", kv_cache_dtype="fp8", calculate_kv_scales=True)
        """,
    ],
    "other load formats": [
        """
        from vllm import LLM
        LLM(model="demo", load_format="npcache")
        """,
    ],
    "weights in host memory": [
        """
        from vllm import LLM
        LLM(model="demo", offload_group_size=4)
        """,
    ],
    "which this model does not take": [
        """
        from vllm import LLM
        llm = LLM(model="demo", limit_mm_per_prompt={"image": 1})
        llm.generate({"prompt": "USER: <image>", "multi_modal_data": {"image": object()}})
        """,
        """
        from vllm import LLM
        url = {"url": "https://example.com/image.png"}
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": url}]
        LLM(model="demo").chat([{"role": "user", "content": content}])
        """,
    ],
    "best_of": [
        """
        from vllm import SamplingParams
        SamplingParams(n=1, best_of=4)
        """,
    ],
    "beam search in SamplingParams": [
        """
        from vllm import SamplingParams
        SamplingParams(n=4, use_beam_search=True, temperature=0, early_stopping=True)
        """,
    ],
    "logits processors per request": [
        """
        from vllm import SamplingParams
        SamplingParams(logits_processors=[lambda token_ids, logits: logits])
        """,
    ],
    "request tracing and further metrics": [
        """
        from vllm import LLM
        LLM(model="demo", otlp_traces_endpoint="grpc://localhost:4317")
        """,
    ],
    "KV transfer by vLLM's own connectors": [
        """
        from vllm.distributed.kv_transfer import KVTransferAgent
        """,
    ],
    "models and layers of vLLM's": [
        """
        from vllm.model_executor.models.llama import LlamaForCausalLM
        """,
    ],
}

# With vLLM's name of the program, each with what it prints or is refused with.
COMMANDS = {
    "vllm launch render demo": "asks for the HTTP server",
    "vllm run-batch --help": "Answer a file of requests in OpenAI's batch format",
    "vllm complete --quick Hello": "asks for the HTTP server",
    "vllm chat --url http://localhost:8000/v1": "asks for the HTTP server",
    "vllm bench latency --model demo --nnodes 2": "expert parallelism, several nodes and external load balancers",
    "vllm bench serve --help": "Measure a running server",
    "vllm bench throughput --model demo --dataset-name sharegpt": "asks for benchmarks on datasets",
    "vllm bench latency --model demo --request-rate 4": "asks for server benchmarks",
    "vllm collect-env": "Penstock",
    "vllm --version": "penstock",
    "vllm bench throughput --model demo --dataset-name random --random-input-len 8 --random-output-len 4"
    " --num-prompts 2 --max-model-len 64": "throughput, 2 requests at once, 8 in, 4 out",
    "vllm bench throughput --model demo --input-len 8 --output_len=4 --num-prompts 2 --max_model_len 64 --enforce-eager"
    " --gpu-memory-utilization 0.9 --trust-remote-code": "throughput, 2 requests at once, 8 in, 4 out",
}
