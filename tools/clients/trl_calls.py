"""Calls of TRL's clients, for `trl_recordings`, in whose environment this runs: one path of the URL per call."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

_INIT_INFO = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
_UPDATE_INFO = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[3, 2]]}


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Its name.
    """
    return city


def make_calls(url: str) -> None:
    """Make every call. Its name is the path before that of the route."""
    client = VLLMClient(base_url=f"{url}/check_server")

    def call(name: str, *args: Any, **kwargs: Any) -> None:
        client.base_url = f"{url}/{name}"
        getattr(client, name)(*args, **kwargs)

    # The groups of this client need CUDA; its requests do not.
    communicator = SimpleNamespace(group=SimpleNamespace())
    with (
        mock.patch.object(vllm_client, "open_trainer_endpoint", return_value=communicator),
        mock.patch.object(vllm_client, "packed_nccl_broadcast_producer"),
        mock.patch.object(vllm_client, "get_ip", return_value="127.0.0.1"),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        call("init_communicator", "cuda:0")
        call("generate", [[1, 2], [3, 4, 5]], n=2, temperature=0.7, max_tokens=4)
        further = {"seed": 3, "frequency_penalty": 0.5}
        regex = {"structured_outputs_regex": "[ab]+"}
        call("generate", ["Hello", "Now"], logprobs=2, max_tokens=3, generation_kwargs=further, **regex)
        chats = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]]
        call("chat", chats, max_tokens=3, tools=[weather], chat_template_kwargs={"style": "plain"})
        call("get_sequence_logprobs", [[1, 2, 3, 4], [5, 6, 7]], [2, 1], top_logprobs=3, temperature=0.9)
        model = torch.nn.Linear(2, 3)
        call("update_model_params", model)
        client.base_url = f"{url}/weight_update"
        with client.weight_update():
            for name, parameter in model.named_parameters():
                client.update_named_param(name, parameter.data.to(torch.bfloat16))
        call("reset_prefix_cache")
    PartialState(cpu=True)  # what the asynchronous client's logger asks for
    asynchronous = AsyncClient(url)
    for name, args in {
        "wait_for_server_ready": (),
        "get_max_model_len": (),
        "get_dtype": (),
        "get_world_size": (),
        "pause": (),
        "init_weight_transfer_engine": (_INIT_INFO,),
        "start_weight_update": (),
        "update_weights": (_UPDATE_INFO,),
        "finish_weight_update": (),
        "resume": (),
        "load_lora_adapter": ("adapter-v1", "/adapters/v1"),
        "unload_lora_adapter": ("adapter-v1",),
    }.items():
        asynchronous.server_url = f"{url}/async_{name}"
        getattr(asynchronous, name)(*args)


if __name__ == "__main__":
    make_calls(sys.argv[1])
