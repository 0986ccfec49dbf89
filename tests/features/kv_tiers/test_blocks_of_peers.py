"""Blocks of other engines: what one has computed, another one copies; whatever fails is computed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from penstock.features.kv_files.files import LAYOUT
from penstock.features.kv_peers import peers
from penstock.features.kv_peers.peers import Peers, PeerServer, Source
from penstock.features.kv_tiers.choice import LoadChoice
from penstock.features.kv_tiers.scheduling import TierScheduling
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, greedy, make_core, random_prompts, run
from support.features import scheduler_side

PROMPTS = random_prompts([70, 100, 33, 7], vocab_size=97)
SECRET = b"a secret of some length"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    return path


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@contextlib.contextmanager
def engine(model: Path, name: str, secret: Path, **options: Any) -> Iterator[EngineCore]:
    folder = secret.parent / name
    folder.mkdir(exist_ok=True)
    if "kv_listen" in options or "kv_peers" in options:
        options["kv_secret_file"] = str(secret)
    core = make_core(model, kv_offload_dir=str(folder), kv_load_policy="always", **options)
    try:
        yield core
    finally:
        core.close()


@contextlib.contextmanager
def driven(core: EngineCore) -> Iterator[None]:
    """Run the core's turns in another thread."""
    is_over = threading.Event()

    def run_turns() -> None:
        while not is_over.wait(0.005):
            while core.has_unfinished_requests():
                core.step()

    thread = threading.Thread(target=run_turns)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def answers(core: EngineCore) -> list[Result]:
    return run(core, PROMPTS, greedy(8, logprobs=2))


def same(found: list[Result], expected: list[Result]) -> bool:
    return [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in expected]


def count(core: EngineCore, name: str) -> int:
    return core.stats().counters[name]


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow), "lfm2"])
def test_an_engine_copies_what_another_one_has_computed(
    tmp_path: Path, secret: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was sent is loaded, even where computing it would be sooner.
    monkeypatch.setattr(LoadChoice, "is_sooner_computed", lambda *_: True)
    save_checkpoint(tiny_model(family), tmp_path / "model")
    address = free_address()
    with (
        engine(tmp_path / "model", "one", secret, kv_listen=address) as one,
        engine(tmp_path / "model", "two", secret, kv_peers=address) as two,
    ):
        expected = answers(one)
        with driven(one):
            # Blocks that are about to be written are waited for.
            found = answers(two)
        assert same(found, expected)
        assert count(two, "kv_tier_copied_bytes") > 0
        assert count(two, "external_prefix_cache_hits") == sum(result.num_cached_tokens for result in found) > 100
        assert count(two, "kv_peer_hits") == count(two, "external_prefix_cache_hits")
        assert count(two, "kv_peer_queries") == count(two, "external_prefix_cache_queries")
        two.scheduler.kv_cache.check_integrity()
        copied, num_hits = count(two, "kv_tier_copied_bytes"), count(two, "kv_peer_hits")
        assert two.reset_prefix_cache()
        monkeypatch.undo()
        answers(two)
        assert count(two, "kv_tier_copied_bytes") == copied
        # What was copied once is in the folder.
        assert count(two, "kv_peer_hits") == num_hits
        assert count(two, "kv_folder_hits") == count(two, "external_prefix_cache_hits") - num_hits > 100
        assert count(two, "kv_host_queries") == 0


def test_a_peer_that_ends_is_paused_and_its_blocks_are_computed(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.3)
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", "two", secret, kv_peers=free_address()) as two:
        found = answers(two)
        assert count(two, "kv_tier_copied_bytes") == 0
    with engine(tmp_path / "model", "three", secret) as three:
        assert [one.tokens for one in answers(three)] == [one.tokens for one in found]
    assert caplog.text.count("is not asked for blocks for 10 s: it has not answered") == 1


def test_another_secret_gets_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.5)
    path = f"{LAYOUT}/{'0' * 32}/00/{'0' * 64}-0"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(b"block")
    address = free_address()
    server = PeerServer(tmp_path, address, SECRET, set)
    try:
        for secret, expected in ((SECRET, address), (b"another secret, as long", "")):
            assert ask(secret, address, [path])[0].address == expected
    finally:
        server.close()


def ask(secret: bytes, address: str, paths: list[str], root: Path = Path()) -> tuple[Source, set[str]]:
    client = Peers(root, [address], secret)
    try:
        answered: list[tuple[Source, set[str]]] = []
        client.find(paths, lambda source, there: answered.append((source, there)))
        give_up_at = time.monotonic() + 30
        while not answered and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return answered[0]
    finally:
        client.close()


def test_no_other_file_is_served(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "private").write_bytes(b"private")
    address = free_address()
    server = PeerServer(tmp_path / "root", address, SECRET, set)
    client = Peers(tmp_path, [address], SECRET)
    try:
        with client._connected(address) as asked:
            for path in ("../private", str(tmp_path / "private"), f"{LAYOUT}/../../private"):
                asked.send(msgspec.msgpack.encode(peers._Question([path], wants_content=True)))
                assert asked.recv_multipart()[-1] == b""
            asked.send(b"\x00 no question")
            asked.send(msgspec.msgpack.encode(peers._Question([])))
            assert asked.recv_multipart()[-1] == b""
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_listen": "7000"}, "kv_listen='7000' is not valid. Allowed: a host and a port"),
        ({"kv_peers": "there:70000"}, "kv_peers='there:70000' is not valid"),
        ({"kv_peers": ["there:7000"]}, "kv_peers='there:7000' needs kv_secret_file"),
        ({"kv_peers_other_ranks": True}, "kv_peers_other_ranks=True has no effect without kv_peers"),
        ({"kv_listen": "there:7000", "kv_offload_dir": None}, "needs kv_offload_dir"),
        ({"kv_listen": "127.0.0.1:7000", "kv_secret_file": "/nowhere"}, "kv_secret_file='/nowhere' cannot be read"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_core(tmp_path, **{"kv_offload_dir": str(tmp_path), **options})


def test_engines_beside_each_other_listen_at_one_address(tmp_path: Path, secret: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    options = {"kv_listen": free_address(), "data_parallel_size": 2, "data_parallel_size_local": 1}
    with engine(tmp_path / "model", "one", secret, data_parallel_rank=0, **options) as first:
        with engine(tmp_path / "model", "one", secret, data_parallel_rank=1, **options) as second:
            copies = [scheduler_side(core, TierScheduling)._copies for core in (first, second)]
            assert [one is not None and one._server is not None for one in copies] == [True, False]
        with (
            pytest.raises(ConfigError, match=f"kv_listen='{options['kv_listen']}': Address already in use"),
            engine(tmp_path / "model", "two", secret, data_parallel_rank=1, **options),
        ):
            pass


def test_an_address_that_is_taken_is_an_error(tmp_path: Path, secret: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"kv_listen='{address}': Address already in use"),
            engine(tmp_path / "model", "one", secret, kv_listen=address),
        ):
            pass


def test_a_peer_that_is_started_again_with_other_weights_gives_no_block_of_these(
    tmp_path: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "others", seed=1)
    address = free_address()
    with engine(tmp_path / "model", "zero", secret) as zero:
        expected = answers(zero)
    with engine(tmp_path / "model", "two", secret, kv_peers=address) as two:
        with engine(tmp_path / "model", "one", secret, kv_listen=address) as one:
            run(one, PROMPTS[:1], greedy(1))
            with driven(one):
                assert same(run(two, PROMPTS[:1], greedy(8, logprobs=2)), expected[:1])
        copied = count(two, "kv_tier_copied_bytes")
        assert copied > 0
        with engine(tmp_path / "others", "other", secret, kv_listen=address) as one:
            assert not same(answers(one), expected)
            with driven(one):
                assert same(answers(two), expected)
        assert count(two, "kv_tier_copied_bytes") == copied
    assert f"The peer {address} has no blocks that this engine can use" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("of_peer", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_shares_of_other_ranks_are_not_copied_and_the_log_says_so(
    tmp_path: Path, secret: Path, caplog: pytest.LogCaptureFixture, of_peer: dict[str, Any]
) -> None:
    tiny_checkpoint(tmp_path / "model")
    address = free_address()
    with engine(tmp_path / "model", "zero", secret) as zero:
        expected = answers(zero)
    with (
        engine(tmp_path / "model", "one", secret, kv_listen=address, **of_peer) as one,
        engine(tmp_path / "model", "two", secret, kv_peers=address) as two,
    ):
        answers(one)
        with driven(one):
            assert same(answers(two), expected)
        assert count(two, "kv_tier_copied_bytes") == 0
    assert caplog.text.count("it has ranks 2 in place of 1") == 1


def test_a_copy_of_a_drafter_on_another_machine_is_the_same_drafter(tmp_path: Path, secret: Path) -> None:
    head = Path(penstock.__file__).parent / "assets" / "demo-eagle3"
    copy = shutil.copytree(head, tmp_path / "head")
    speculative: dict[str, Any] = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head)}
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    digests = []
    for changed in ({}, {"model": str(copy)}, {"num_speculative_tokens": 2}):
        with engine(Path("demo"), "blocks", secret, speculative_config={**speculative, **changed}) as core:
            digests.append(Path(core.collective_rpc(RpcCall("kv_tier_folder"))[0]).name)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize(("of_peer", "of_own"), [(2, 1), (1, 2)])
def test_shares_of_heads_are_put_together_and_split_where_that_is_asked_for(
    tmp_path: Path, secret: Path, cache: str, of_peer: int, of_own: int
) -> None:
    # Windows are groups of their own, of which a hit has the last blocks alone.
    save_checkpoint(tiny_model("gemma2"), tmp_path / "model")
    address = free_address()
    own: dict[str, Any] = {"tensor_parallel_size": of_own, "kv_cache_dtype": cache}
    with engine(tmp_path / "model", "zero", secret, **own) as zero:
        expected = answers(zero)
    others = {**own, "tensor_parallel_size": of_peer}
    with engine(tmp_path / "model", "one", secret, kv_listen=address, **others) as one:
        answers(one)
        with (
            driven(one),
            engine(tmp_path / "model", "two", secret, kv_peers=address, kv_peers_other_ranks=True, **own) as two,
        ):
            found = answers(two)
            assert count(two, "external_prefix_cache_hits") > 100
            assert count(two, "kv_tier_failed_loads") == 0
            two.scheduler.kv_cache.check_integrity()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        for row, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert row == pytest.approx(other, abs=1e-4 if cache == "auto" else 1e-2)
    # Shares that were fetched are gone, and no engine without the option takes what was made of them.
    kinds = {path.parts[-3] for path in (tmp_path / "two").rglob("*") if path.is_file() and len(path.parts[-2]) == 2}
    assert len(kinds) == of_own
    with engine(tmp_path / "model", "two", secret, **own) as plain:
        assert same(answers(plain), expected)
        assert count(plain, "external_prefix_cache_hits") == 0


@pytest.mark.parametrize("family", ["lfm2", "deepseek_v3"])
def test_blocks_that_are_not_shares_of_heads_are_refused(tmp_path: Path, secret: Path, family: str) -> None:
    save_checkpoint(tiny_model(family), tmp_path / "model")
    options: dict[str, Any] = {"kv_peers": free_address(), "kv_peers_other_ranks": True}
    with (
        pytest.raises(ConfigError, match="kv_peers_other_ranks=True is not valid for this engine, whose blocks"),
        engine(tmp_path / "model", "blocks", secret, **options),
    ):
        pass
