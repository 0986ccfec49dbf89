"""Groups that belong to no engine: rank 0's tensors arrive at all others, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from penstock.engine.script_helpers import get_open_port
from penstock.errors import WaitTimeout, WeightTransferFailed
from penstock.parallel import weight_stream
from penstock.parallel.stateless_group import PyNcclCommunicator, StatelessProcessGroup

TENSORS = [
    torch.randn(3, 5),
    torch.randn(2, 7).to(torch.bfloat16),
    torch.randn(4).to(torch.float16),
    torch.arange(6).view(2, 3),
    torch.tensor(2.5),
]


def join(port: int, rank: int, size: int) -> PyNcclCommunicator:
    group = StatelessProcessGroup.create(host="127.0.0.1", port=port, rank=rank, world_size=size, store_timeout=60)
    return PyNcclCommunicator(group, device="cpu")


def run_all(*functions: Callable[[], object]) -> None:
    """Run functions in threads of their own. Raises what one of them raises."""
    with ThreadPoolExecutor(len(functions)) as threads:
        for future in [threads.submit(function) for function in functions]:
            future.result()


@pytest.fixture
def communicators() -> Iterator[list[PyNcclCommunicator]]:
    port = get_open_port()
    with ThreadPoolExecutor(3) as threads:
        ranks = list(threads.map(lambda rank: join(port, rank, 3), range(3)))
    yield ranks
    for one in ranks:
        one.close()


def test_every_rank_gets_the_tensors_of_one(communicators: list[PyNcclCommunicator]) -> None:
    received = [[torch.empty_like(tensor) for tensor in TENSORS] for _ in communicators]
    received[1] = TENSORS

    def take(rank: int) -> None:
        for tensor in received[rank]:
            communicators[rank].broadcast(tensor, src=1)

    run_all(*(partial(take, rank) for rank in range(3)))
    for tensors in received:
        assert all(torch.equal(one, expected) for one, expected in zip(tensors, TENSORS, strict=True))


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(WaitTimeout, match="for rank 1, of 2"):
        StatelessProcessGroup.create("127.0.0.1", get_open_port(), 0, 2, store_timeout=0.2)


def receive(communicator: PyNcclCommunicator, tensors: list[torch.Tensor], *, packed: bool) -> list[torch.Tensor]:
    dtypes, shapes = [one.dtype for one in tensors], [list(one.shape) for one in tensors]
    return [one.clone() for one in weight_stream.receive(communicator, dtypes, shapes, packed=packed)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 61, 1 << 20])
def test_a_stream_of_weights_arrives_as_it_was_sent(
    communicators: list[PyNcclCommunicator], packed: bool, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", bucket_bytes)
    tensors = [torch.tensor([1], dtype=torch.uint8), *TENSORS, torch.randn(6, 4).T]
    received: dict[int, list[torch.Tensor]] = {}
    run_all(
        lambda: weight_stream.send(communicators[0], iter(tensors), packed=packed),
        lambda: received.update({1: receive(communicators[1], tensors, packed=packed)}),
        lambda: received.update({2: receive(communicators[2], tensors, packed=packed)}),
    )
    for rank in (1, 2):
        assert all(torch.equal(one, sent) for one, sent in zip(received[rank], tensors, strict=True))


def test_tensors_that_are_not_as_announced_are_refused(communicators: list[PyNcclCommunicator]) -> None:
    def fail(rank: int) -> None:
        with pytest.raises(WeightTransferFailed, match=r"sends 60 bytes .* instead of 24 bytes .*float32 \[2, 3\]"):
            receive(communicators[rank], [torch.empty(2, 3)], packed=True)

    def send() -> None:
        with pytest.raises(WeightTransferFailed, match="Rank 0 of 3 lost"):
            weight_stream.send(communicators[0], TENSORS[:1])

    run_all(send, partial(fail, 1), partial(fail, 2))
    with pytest.raises(WeightTransferFailed, match="closed"):
        communicators[1].broadcast(torch.empty(1), src=0)


def test_a_trainer_that_leaves_is_noticed(communicators: list[PyNcclCommunicator]) -> None:
    def fail(rank: int) -> None:
        with pytest.raises(WeightTransferFailed, match=f"Rank {rank} of 3 lost the others"):
            receive(communicators[rank], TENSORS, packed=False)

    def leave() -> None:
        weight_stream.send(communicators[0], TENSORS[:1], packed=False)
        communicators[0].close()

    run_all(leave, partial(fail, 1), partial(fail, 2))
