"""KV cache events of whole engines, as subscribers get them."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock import LLM, SamplingParams
from penstock.config.kv_events import KVEventsConfig, endpoint_of_rank, listens
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from penstock.features.kv_events import publisher as publishers
from penstock.features.kv_events.event_log import KV_CACHE, EventLog
from penstock.features.kv_events.events import BlockRemoved, BlockStored, KVEventBatch
from penstock.features.kv_events.publisher import EventPublisher
from penstock.features.kv_tiers.scheduling import TierScheduling
from penstock.scheduler.cache_watcher import FOLDER, HOST_MEMORY
from support.adapters import VARIANTS, make_adapter, request_of
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import greedy, make_core, random_prompts, run
from support.event_mirror import EventMirror, block_of
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.features import scheduler_side
from support.kept_blocks import VOCAB, branching_prompts, counter
from support.waiting import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PLAYS = ["ROMEO:\nWhat light through yonder window breaks?" * 2, "JULIET:\nO Romeo, Romeo!" * 3, "KING:\nNow"]


def events_at(folder: Path, **fields: Any) -> dict[str, Any]:
    """Options of events at sockets in a folder."""
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        **fields,
    }


class Subscriber:
    """Follows an engine's events from its first batch on.

    A gap is closed by the replay. A lower number is of a new engine, or, if it is not later, of a batch that is known.
    """

    def __init__(self, stack: ExitStack, options: dict[str, Any], rank: int = 0) -> None:
        context = stack.enter_context(zmq.Context())
        self.mirror, self.numbers, self.batches = EventMirror(), list[int](), list[KVEventBatch]()
        self._socket = stack.enter_context(context.socket(zmq.SUB))
        self._socket.subscribe(options.get("topic", ""))
        self._replay = stack.enter_context(context.socket(zmq.DEALER))
        for one, name in ((self._socket, "endpoint"), (self._replay, "replay_endpoint")):
            one.connect(endpoint_of_rank(options[name], rank))

    def follow(self, is_so: Callable[[], object]) -> None:
        """Take batches in until a condition holds."""
        wait_until(lambda: self._take() or is_so(), "it holds after all batches")

    def follow_to(self, number: int) -> None:
        """Take batches in up to one."""
        self.follow(lambda: self.numbers and self.numbers[-1] >= number)

    def ask(self, first: int) -> list[tuple[int, bytes]]:
        """Numbers and payloads that the replay has from one on."""
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self._replay.poll(PATIENCE_S * 1000), "the replay does not end"
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def _take(self) -> None:
        while self._socket.poll(1):
            _, number, payload = self._socket.recv_multipart()
            self._take_batch(int.from_bytes(number, "big"), payload)

    def _take_batch(self, number: int, payload: bytes) -> None:
        last = self.numbers[-1] if self.numbers else -1
        if self._is_new(payload) and number != last + 1:
            for missed, content in self.ask(0 if number <= last else last + 1):
                self._add(missed, content)
        if self._is_new(payload):
            self._add(number, payload)

    def _is_new(self, payload: bytes) -> bool:
        return not self.batches or msgspec.msgpack.decode(payload, type=KVEventBatch).ts > self.batches[-1].ts

    def _add(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        self.batches.append(msgspec.msgpack.decode(payload, type=KVEventBatch))
        self.mirror.take(self.batches[-1].events)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def cached_blocks(core: EngineCore) -> set[tuple[int, int]]:
    pools = core.scheduler.kv_cache.pools
    return {block_of(block.key) for pool in pools for block in pool.blocks if block.key is not None}


def test_a_subscriber_of_an_offline_engine_knows_its_blocks(tmp_path: Path, stack: ExitStack) -> None:
    options = events_at(tmp_path, topic="kv@demo")
    llm = stack.enter_context(LLM("demo", kv_events_config=options, kv_cache_memory_bytes="16MiB"))
    core = llm._session._core
    assert isinstance(core, EngineCore)
    subscriber = Subscriber(stack, options)
    for prompts in (PLAYS, PLAYS[:2]):
        outputs = llm.generate(prompts, GREEDY)
        subscriber.follow_to(counter(core, "kv_event_batches") - 1)
        assert subscriber.mirror.blocks[KV_CACHE] == cached_blocks(core)
    # A prompt's blocks are known by its tokens.
    texts = list(subscriber.mirror.texts.values())
    for output in outputs:
        tokens, size = output.prompt_token_ids, core.scheduler.kv_cache.groups[0].block_size
        assert all(tokens[:end] in texts for end in range(size, len(tokens) + 1, size))
    assert {batch.data_parallel_rank for batch in subscriber.batches} == {0}
    assert llm.reset_prefix_cache()
    subscriber.follow_to(counter(core, "kv_event_batches") - 1)
    assert not subscriber.mirror.blocks[KV_CACHE]
    assert subscriber.mirror.num_clears == 2
    assert counter(core, "kv_event_batches_dropped") == 0


def test_events_are_maps_in_an_array_as_vllm_has_them(tmp_path: Path, stack: ExitStack) -> None:
    options = events_at(tmp_path)
    llm = stack.enter_context(LLM("demo", kv_events_config=options))
    llm.generate(PLAYS[0], GREEDY)
    ((_, first), (_, second), *_) = Subscriber(stack, options).ask(0)
    assert msgspec.msgpack.decode(first)[1:] == [[{"type": "AllBlocksCleared"}], 0]
    ts, (stored, *_), rank = msgspec.msgpack.decode(second)
    assert isinstance(ts, float)
    assert rank == 0
    assert list(stored) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ]
    assert (stored["type"], stored["medium"], stored["extra_keys"][0]) == ("BlockStored", "GPU", None)
    assert all(type(one) is int and 0 <= one < 1 << 64 for one in stored["block_hashes"])


def test_blocks_of_adapters_have_their_names(tmp_path: Path, stack: ExitStack) -> None:
    model, options = tiny_model("llama"), events_at(tmp_path)
    save_checkpoint(model, tmp_path / "model")
    write_tokenizer(tmp_path / "model", byte_level_tokenizer())
    make_adapter(model, tmp_path / "adapter", seed=1, **VARIANTS[0])
    adapter = request_of(3, tmp_path / "adapter")
    llm = stack.enter_context(LLM(str(tmp_path / "model"), enable_lora=True, kv_events_config=options))
    prompt = {"prompt_token_ids": random_prompts([40], vocab_size=VOCAB)[0], "cache_salt": "mine"}
    llm.generate(prompt, GREEDY, lora_request=adapter)
    llm.generate(prompt, GREEDY)
    batches = [msgspec.msgpack.decode(payload, type=KVEventBatch) for _, payload in Subscriber(stack, options).ask(0)]
    stored = [one for batch in batches for one in batch.events if isinstance(one, BlockStored)]
    of_prompt = [one for one in stored if one.parent_block_hash is None]
    assert [(one.lora_id, one.lora_name) for one in of_prompt] == [(3, "adapter3"), (None, None)]
    assert [one.extra_keys[:2] for one in of_prompt if one.extra_keys] == [
        [("adapter3", "mine"), ("adapter3",)],
        [("mine",), None],
    ]
    assert set(of_prompt[0].block_hashes).isdisjoint(of_prompt[1].block_hashes)


@contextmanager
def publisher(options: dict[str, Any], rank: int = 0) -> Iterator[EventPublisher]:
    made = EventPublisher(KVEventsConfig(**options), rank)
    try:
        yield made
    finally:
        made.close()


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([number], "GPU", 0)


def numbers_of(found: list[tuple[int, bytes]]) -> list[int]:
    return [number for number, _ in found]


def test_what_is_not_sent_is_counted_and_found_in_the_replay(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers, "_FIRST_WAIT_S", 10 * PATIENCE_S)
    options = events_at(tmp_path, max_queue_size=2)
    made = stack.enter_context(publisher(options))
    for number in range(6):
        made.publish([removed(number)])
    assert (made.num_batches, made.num_dropped) == (6, 4)
    # The first two have waited for a subscriber. It sees the gap, which the replay closes.
    subscriber = Subscriber(stack, options)
    subscriber.mirror.blocks["GPU"] = {(0, number) for number in range(10)}
    subscriber.follow_to(1)
    assert subscriber.numbers == [0, 1]
    made.publish([removed(6)])
    subscriber.follow_to(6)
    assert subscriber.numbers == list(range(7))
    assert subscriber.mirror.blocks["GPU"] == {(0, 7), (0, 8), (0, 9)}
    assert made.num_dropped == 4


def test_the_replay_has_the_last_batches(tmp_path: Path, stack: ExitStack) -> None:
    options = events_at(tmp_path, buffer_steps=3)
    made = stack.enter_context(publisher(options))
    for number in range(10):
        made.publish([removed(number)])
    subscriber = Subscriber(stack, options)
    assert numbers_of(subscriber.ask(0)) == [7, 8, 9]
    assert numbers_of(subscriber.ask(9)) == [9]
    assert subscriber.ask(10) == []
    # Questions that are none get no answer, and harm none.
    subscriber._replay.send_multipart((b"", b"8"))
    assert numbers_of(subscriber.ask(8)) == [8, 9]
    # A REQ socket gets one message.
    with zmq.Context() as context, context.socket(zmq.REQ) as one:
        one.connect(options["replay_endpoint"])
        one.send((7).to_bytes(8, "big"))
        assert one.poll(PATIENCE_S * 1000)
        number, payload = one.recv_multipart()
    assert int.from_bytes(number, "big") == 7
    assert msgspec.msgpack.decode(payload, type=KVEventBatch).events == [removed(7)]


def test_events_of_a_connector_are_published_as_they_are(tmp_path: Path, stack: ExitStack) -> None:
    log, options = EventLog((), keeps_elsewhere=False), events_at(tmp_path)
    stored = BlockStored([b"hash"], None, [], 16, None, "REMOTE", None, extra_keys=[(Path("a"),)])
    log.connector_told(["its own", stored, removed(1)])
    made = stack.enter_context(publisher(options))
    made.publish(log.take_events())
    ((_, payload),) = Subscriber(stack, options).ask(0)
    first, second = msgspec.msgpack.decode(payload)[1]
    assert (first["block_hashes"], first["medium"], first["extra_keys"]) == ([b"hash"], "REMOTE", [[repr(Path("a"))]])
    assert second == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}


def test_an_engine_may_connect_to_a_subscriber_that_listens(stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.SUB))
    socket.subscribe("")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    made = stack.enter_context(
        publisher({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}", "topic": "t"})
    )
    made.publish([removed(1)])
    assert socket.poll(PATIENCE_S * 1000)
    topic, number, payload = socket.recv_multipart()
    assert (topic, number) == (b"t", bytes(8))
    assert msgspec.msgpack.decode(payload, type=KVEventBatch).events == [removed(1)]


def test_engines_of_data_parallelism_have_endpoints_of_their_own(tmp_path: Path, stack: ExitStack) -> None:
    options = events_at(tmp_path)
    llm = stack.enter_context(
        LLM("demo", data_parallel_size=2, kv_events_config=options, num_threads=1, kv_cache_memory_bytes="16MiB")
    )
    subscribers = [Subscriber(stack, options, rank) for rank in range(2)]
    llm.generate(PLAYS, GREEDY)
    for rank, subscriber in enumerate(subscribers):
        subscriber.follow(lambda one=subscriber: one.mirror.blocks[KV_CACHE])
        assert {batch.data_parallel_rank for batch in subscriber.batches} == {rank}
    texts = [list(subscriber.mirror.texts.values()) for subscriber in subscribers]
    assert not any(text in texts[1] for text in texts[0])


@pytest.mark.slow
def test_a_core_that_replaces_a_lost_one_begins_without_blocks(tmp_path: Path, stack: ExitStack) -> None:
    options = events_at(tmp_path)
    llm = stack.enter_context(
        LLM(
            "demo",
            enable_multiprocessing=True,
            kv_events_config=options,
            num_threads=1,
            kv_cache_memory_bytes="16MiB",
        )
    )
    subscriber = Subscriber(stack, options)
    llm.generate(PLAYS[0], GREEDY)
    subscriber.follow(lambda: len(subscriber.mirror.blocks[KV_CACHE]) >= 2)
    before, num_batches = set(subscriber.mirror.blocks[KV_CACHE]), len(subscriber.batches)
    (pid,) = llm._session._core.process_ids  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    llm.generate(PLAYS[1], GREEDY)
    subscriber.follow(lambda: subscriber.mirror.num_clears == 2 and len(subscriber.mirror.blocks[KV_CACHE]) >= 2)
    assert subscriber.numbers[num_batches:] == list(range(len(subscriber.numbers) - num_batches))
    assert before.isdisjoint(subscriber.mirror.blocks[KV_CACHE])


@pytest.mark.parametrize("seed", range(2))
def test_blocks_in_host_memory_and_in_a_folder_are_told_too(tmp_path: Path, stack: ExitStack, seed: int) -> None:
    tiny_checkpoint(tmp_path / "model")
    (tmp_path / "blocks").mkdir()
    choose = random.Random(seed)
    core = make_core(
        tmp_path / "model",
        num_blocks=40,
        max_num_seqs=3,
        kv_offloading_size=(60 << 10) / (1 << 30),
        kv_offload_dir=str(tmp_path / "blocks"),
        kv_events_config=events_at(tmp_path),
    )
    stack.callback(core.close)
    subscriber, side = Subscriber(stack, events_at(tmp_path)), scheduler_side(core, TierScheduling)

    def check() -> None:
        side._save_all()
        scheduler_side(core, EventLog).after_step()  # type: ignore[attr-defined]
        subscriber.follow_to(counter(core, "kv_event_batches") - 1)
        assert subscriber.mirror.blocks[KV_CACHE] == cached_blocks(core)
        host = side._places.host
        in_host = set() if host is None else {block_of(key) for key, one in host._blocks.items() if one.is_whole}
        assert subscriber.mirror.blocks[HOST_MEMORY] == in_host
        names = {path.name.partition("-")[0] for path in (tmp_path / "blocks").rglob("*-0")}
        assert subscriber.mirror.blocks[FOLDER] == {block_of((0, bytes.fromhex(name))) for name in names}

    prompts = branching_prompts(choose, seed)
    for _ in range(3):
        run(core, choose.sample(prompts, 5), greedy(6))
        check()
    assert all(subscriber.mirror.blocks[medium] for medium in (KV_CACHE, HOST_MEMORY, FOLDER))
    assert core.reset_prefix_cache()
    check()
    assert not subscriber.mirror.blocks[KV_CACHE]
    assert subscriber.mirror.blocks[FOLDER]
    # Loaded blocks are told again, with the texts that they had.
    run(core, prompts[:5], greedy(6))
    assert counter(core, "external_prefix_cache_hits") > 0
    check()
    assert core.reset_prefix_cache(reset_connector=True)
    check()
    assert not any(subscriber.mirror.blocks.values())


def test_files_that_make_room_are_told(tmp_path: Path, stack: ExitStack) -> None:
    tiny_checkpoint(tmp_path / "model")
    (tmp_path / "blocks").mkdir()
    core = make_core(tmp_path / "model", kv_offload_dir=str(tmp_path / "blocks"), kv_events_config=events_at(tmp_path))
    stack.callback(core.close)
    subscriber, side = Subscriber(stack, events_at(tmp_path)), scheduler_side(core, TierScheduling)
    run(core, random_prompts([60] * 3, vocab_size=VOCAB), greedy(2))
    side._save_all()
    limit = side._places.limit
    assert limit is not None
    limit._max_bytes = limit.num_bytes // 2
    limit.enforce()
    core.step()
    subscriber.follow_to(counter(core, "kv_event_batches") - 1)
    names = {path.name.partition("-")[0] for path in (tmp_path / "blocks").rglob("*-0")}
    assert 0 < len(names) < 9
    assert subscriber.mirror.blocks[FOLDER] == {block_of((0, bytes.fromhex(name))) for name in names}


@pytest.mark.parametrize(
    ("endpoint", "is_listening"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/events", True),
        ("tcp://10.0.0.0:5557", False),
        ("tcp://[fd00::5]:5557", False),
        ("tcp://router:5557", False),
    ],
)
def test_an_endpoint_with_a_host_is_connected_to(endpoint: str, is_listening: bool) -> None:
    assert listens(endpoint) is is_listening


ON = {"enable_kv_cache_events": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("on", "kv_events_config='on' is not JSON"),
        (7, r"kv_events_config=7 is not valid. Allowed: a dictionary, such as {'enable_kv_cache_events': True}"),
        ({"endpoint": "tcp://*:1"}, "no effect without enable_kv_cache_events. Give it, as True or False"),
        ({**ON, "port": 1}, "kv_events_config has 'port'. Allowed: enable_kv_cache_events, publisher, endpoint"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events of kv_events_config='yes' is not valid"),
        ({**ON, "publisher": "nats"}, "publisher of kv_events_config='nats' is not valid. Allowed: null, zmq"),
        ({**ON, "endpoint": "5557"}, r"endpoint='5557' .* Allowed: 'tcp://HOST:PORT', with '\*' as the host to listen"),
        ({**ON, "endpoint": "inproc://events"}, "endpoint='inproc://events' of kv_events_config is not valid"),
        ({**ON, "endpoint": "tcp://*:70000"}, "is not valid"),
        ({**ON, "endpoint": None}, "endpoint=None of kv_events_config is not valid"),
        ({**ON, "replay_endpoint": "tcp://router:5558"}, "Allowed: an endpoint at which the engine listens"),
        ({**ON, "replay_endpoint": "tcp://*:5557"}, "data_parallel_size=1, whose engine N has both ports plus N"),
        ({**ON, "buffer_steps": 0}, "buffer_steps of kv_events_config=0 is not valid. Allowed: an integer from 1"),
        ({**ON, "hwm": -1}, "hwm of kv_events_config=-1 is not valid"),
        ({**ON, "max_queue_size": "many"}, "max_queue_size of kv_events_config='many' is not valid"),
        ({**ON, "topic": 3}, "topic=3 of kv_events_config is not valid. Allowed: a text"),
    ],
)
def test_wrong_options_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message if given == 7 or "\\" in message else re.escape(message)):
        LLM("demo", kv_events_config=given)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"enable_prefix_caching": False}, "kv_events_config is not valid with enable_prefix_caching=False"),
        (
            {"data_parallel_size": 2, "kv_events_config": {**ON, "replay_endpoint": "tcp://*:5558"}},
            "Give ports that are at least 2 apart",
        ),
        (
            {"data_parallel_size": 2, "kv_events_config": {**ON, "endpoint": "tcp://*:65535"}},
            "whose last engine has a port above 65535. Give a lower port",
        ),
    ],
)
def test_options_that_contradict_others_are_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **{"kv_events_config": ON, **others})


def test_pyzmq_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kv_events_config needs pyzmq: pip install 'penstock\[peers\]'"):
        KVEventsConfig(**ON)
    assert not KVEventsConfig(publisher="zmq").is_on
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").is_on


def test_an_endpoint_that_is_taken_is_named(tmp_path: Path, stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.PUB))
    port = socket.bind_to_random_port("tcp://*")
    with pytest.raises(ConfigError, match=rf"endpoint='tcp://\*:{port}' of kv_events_config: Address already in use"):
        LLM("demo", kv_events_config={**ON, "endpoint": f"tcp://*:{port}"})
