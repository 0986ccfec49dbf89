"""A batch on real servers: a front end that is killed, and a server that is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai import OpenAI

from support.server_process import ServerProcess
from support.waiting import wait_until

NUM_REQUESTS = 60
OPTIONS = ("--api-server-count", "2", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "32MiB", "--threads", "1")


def num_answered(client: OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    assert counts is not None
    return counts.completed


@pytest.mark.slow
def test_a_batch_survives_its_front_ends_and_its_server(tmp_path: Path) -> None:
    arguments = (*OPTIONS, "--batch-dir", str(tmp_path / "batches"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": {**body, "seed": number}}
        for number in range(NUM_REQUESTS)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    first = ServerProcess(tmp_path / "first.log", *arguments)
    try:
        first.wait_until_ready()
        with first.client() as client:
            file = client.files.create(file=("in.jsonl", data), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_until(lambda: num_answered(client, batch.id) > 0, "one is answered")
        for front_end in first.processes("front-end"):
            front_end.kill()
        wait_until(lambda: len(first.processes("front-end")) == 2, "they are replaced")
    finally:
        first.close()
    partial = tmp_path / "batches" / "batches" / f"{batch.id}.output"
    kept = partial.read_bytes()
    assert 0 < kept.count(b"\n") < NUM_REQUESTS
    second = ServerProcess(tmp_path / "second.log", *arguments)
    try:
        second.wait_until_ready()
        with second.client() as client:
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends")
            output = client.batches.retrieve(batch.id).output_file_id
            assert output is not None
            text = client.files.content(output).text
        answers = [json.loads(line) for line in text.splitlines()]
        # Answers of the first server stay, but for a line that it did not finish.
        assert text.encode().startswith(kept[: kept.rindex(b"\n") + 1])
        assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(NUM_REQUESTS))
    finally:
        second.close()
