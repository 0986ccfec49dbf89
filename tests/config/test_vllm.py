"""vLLM's arguments, values, methods and names: every entry of the table is tried."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import penstock
from penstock import LLM, AsyncEngine, BeamSearchParams, EngineConfig, SamplingParams
from penstock.cli.app import app
from penstock.cli.options import parse_options
from penstock.cli.sections import with_dashes
from penstock.config import vllm
from penstock.config.engine import option_is_flag, option_names
from penstock.contract.named_parameters import NamedParameters
from penstock.errors import ConfigError, InvalidParameter, PenstockError, UnknownOption, UnsupportedFeature
from penstock.server.options import ServerOptions
from penstock.system import env
from support.fake_engine import write_model

TABLE = vllm.table()
OPTIONS = TABLE.entries["options"]
# No argument of vLLM's asks for nothing with this value.
ASKS = "something"


def of_kind(kind: str, *, refused: bool) -> list[str]:
    if refused:
        return list(TABLE.entries[kind])
    return [*TABLE.ignored[kind], *(TABLE.ignored["flags"] if kind == "options" else ())]


def harmless(kind: str, name: str) -> tuple[Any, ...]:
    entry = TABLE.entries[kind].get(name)
    return tuple(TABLE.allowed.get(name, (True, 7, ASKS, {"key": 1}))) if entry is None else entry.harmless


def asking(entry: vllm.Entry) -> Any:
    """A value that asks for the feature."""
    return not entry.harmless[0] if entry.is_flag else ASKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def arguments_of(*args: str) -> dict[str, Any]:
    """Arguments that `penstock generate` gets."""
    command = get_command(app).commands["generate"]  # type: ignore[attr-defined]
    return dict(command.make_context("generate", list(args), token_normalize_func=with_dashes).params)


def create_by_flags(model: str, *flags: str) -> EngineConfig:
    """The configuration that a command makes of these flags."""
    return EngineConfig.create(model, **parse_options(arguments_of(*flags)["engine_option"]))


# Options.


def test_every_name_is_in_one_place() -> None:
    assert not set(OPTIONS) & set(option_names())
    assert not set(OPTIONS) & set(TABLE.other_names["options"])
    assert not set(TABLE.entries["parameters"]) & set(SamplingParams.__struct_fields__)
    content = tomllib.loads(Path(vllm.__file__).with_suffix(".toml").read_text())
    keys = ("options", "flags", "defaults")
    listed = [name for feature in content["features"] for key in keys for name in feature.get(key, ())]
    assert sorted(listed) == sorted(OPTIONS)
    ignored = of_kind("options", refused=False)
    assert len({*ignored, *listed}) == len(ignored) + len(listed)
    assert not {*ignored} & {*option_names(), *TABLE.other_names["options"]}


def test_every_key_of_a_feature_is_known() -> None:
    content = tomllib.loads(Path(vllm.__file__).with_suffix(".toml").read_text())
    known = {"name", "planned", "instead", "values", *vllm._ASKING}
    for feature in content["features"]:
        assert set(feature) <= known, feature["name"]
        assert set(feature) > {"name", "planned", "instead"}, feature["name"]
        assert feature["instead"].endswith(".")


@pytest.mark.parametrize("name", TABLE.same["options"])
def test_options_of_the_same_name_are_ours(name: str) -> None:
    assert name in option_names()


@pytest.mark.parametrize(("name", "own_name"), TABLE.other_names["options"].items())
def test_options_of_another_name_are_ours(name: str, own_name: str, model: str) -> None:
    values: dict[str, Any] = {"memory_fraction": 0.5, "kv_cache_memory_bytes": 1 << 20, "policy": "priority"}
    values |= {"hf_overrides.rope_scaling": {"rope_type": "linear", "factor": 2.0}, "hf_overrides.rope_theta": 5e5}
    value = {**values, "convert": "embed", "pooler_config": {"pooling_type": "mean"}}[own_name]
    option, _, key = own_name.partition(".")
    own = {option: {key: value} if key else value}
    assert EngineConfig.create(model, **{name: value}) == EngineConfig.create(model, **own)
    assert EngineConfig.create(model, **{name: value}) != EngineConfig.create(model)


@pytest.mark.parametrize("name", [*OPTIONS, *of_kind("options", refused=False)])
def test_values_that_ask_for_nothing_are_accepted(name: str, model: str) -> None:
    for value in (*harmless("options", name), None, "", [], {}):
        assert EngineConfig.create(model, **{name: value}) == EngineConfig.create(model)


@pytest.mark.parametrize("name", of_kind("options", refused=True))
def test_an_option_that_asks_for_a_feature_is_refused_by_its_name(name: str, model: str) -> None:
    value = asking(OPTIONS[name])
    with pytest.raises(ConfigError) as raised:
        EngineConfig.create(model, **{name: value})
    assert isinstance(raised.value, UnsupportedFeature)
    feature = OPTIONS[name].feature
    for part in (f"{name}={value!r}", feature.name, feature.instead, "planned"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("name", "nothing", "asks"),
    [
        ("eplb_config", {}, {"window_size": 1000}),
        ("all2all_backend", "allgather_reducescatter", "deepep_low_latency"),
        ("data_parallel_backend", "mp", "ray"),
    ],
)
def test_a_collection_asks_for_a_feature_where_one_of_its_values_does(
    name: str, nothing: Any, asks: Any, model: str
) -> None:
    assert EngineConfig.create(model, **{name: nothing}) == EngineConfig.create(model)
    with pytest.raises(UnsupportedFeature, match=f"^{name}="):
        EngineConfig.create(model, **{name: asks})


# `--config` is the commands' own.
@pytest.mark.parametrize("name", [name for name in of_kind("options", refused=True) if name != "config"])
def test_a_flag_of_a_command_means_the_option(name: str, model: str) -> None:
    value = asking(OPTIONS[name])
    flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
    with pytest.raises(UnsupportedFeature, match=f"^{name}={value!r} asks for"):
        create_by_flags(model, flag, *([] if OPTIONS[name].is_flag else [value]))


@pytest.mark.parametrize("name", of_kind("options", refused=False))
def test_a_flag_that_changes_nothing_is_accepted(name: str, model: str) -> None:
    value = [] if option_is_flag(name) else TABLE.allowed.get(name, ["7"])[:1]
    assert create_by_flags(model, f"--{name}", *value) == EngineConfig.create(model)


@pytest.mark.parametrize("feature", TABLE.features, ids=lambda feature: feature.name)
def test_every_entrance_refuses_the_same(feature: vllm.Feature) -> None:
    names = [name for name in of_kind("options", refused=True) if OPTIONS[name].feature is feature]
    for name in names[:1]:
        value = asking(OPTIONS[name])
        for entrance in (LLM, AsyncEngine):
            with pytest.raises(UnsupportedFeature, match=name):
                entrance("demo", **{name: value})
        result = CliRunner().invoke(app, ["plan", "demo", "--option", f"{name}={value}"])
        assert result.exit_code == 2
        flag = name.replace("_", "-")
        said = {True: f"--{flag}", False: f"--no-{flag}"}.get(value, f"--{flag} {value}")
        assert f"{said} asks for {feature.name}" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in TABLE.refused_values.items() for value in values]
)
def test_values_of_our_own_options_can_ask_for_a_feature(option: str, value: str, model: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{option}='{value}' asks for"):
        EngineConfig.create(model, **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "own_value"),
    [
        (option, value, own_value)
        for option, values in TABLE.values.items()
        for value, own_value in values.items()
        if option != "quantization" and option not in TABLE.other_names["parameters"]
    ],
)
def test_values_can_be_written_as_there(option: str, value: str, own_value: str, model: str) -> None:
    ours = {option: own_value} if own_value else {}
    given = int(value) if value == "-1" else value
    assert EngineConfig.create(model, **{option: given}) == EngineConfig.create(model, **ours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_can_be_torchs(dtype: str, model: str) -> None:
    assert EngineConfig.create(model, dtype=getattr(torch, dtype)).model.dtype == dtype


def test_a_dtype_that_no_model_computes_in_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"dtype='int8' is not valid"):
        EngineConfig.create(model, dtype=torch.int8)


@pytest.mark.parametrize("given", ["awq", "auto_awq", "awq_marlin"])
def test_naming_the_quantization_of_the_checkpoint_changes_nothing(given: str, tmp_path: Path) -> None:
    quantized = str(write_model(tmp_path, quantization_config={"quant_method": "awq"}))
    assert EngineConfig.create(quantized, quantization=given) == EngineConfig.create(quantized)


def test_another_quantization_than_the_checkpoints_is_refused_with_its_own(tmp_path: Path) -> None:
    quantized = str(write_model(tmp_path, quantization_config={"quant_method": "awq"}))
    with pytest.raises(ConfigError, match=r"quantization='gptq' is not that of .*Allowed: 'awq', or leave"):
        EngineConfig.create(quantized, quantization="gptq_marlin")


def test_quantization_of_another_checkpoint_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="quantization='awq'"):
        EngineConfig.create(model, quantization="awq")


@pytest.mark.parametrize("name", option_names())
def test_none_takes_the_default(name: str, model: str) -> None:
    assert EngineConfig.create(model, **{name: None}) == EngineConfig.create(model)


def test_an_unknown_option_says_what_it_may_mean_and_where_all_are(model: str) -> None:
    with pytest.raises(UnknownOption, match=r"no option blok_size \(given: 3\)\. Did you mean block_size.*options\.md"):
        EngineConfig.create(model, blok_size=3)
    with pytest.raises(UnknownOption) as raised:
        EngineConfig.create(model, zebra=3)
    assert len(str(raised.value)) < 100


def test_a_long_value_is_shortened(model: str) -> None:
    with pytest.raises(UnsupportedFeature, match="^structured_outputs_config=.{80}… asks for"):
        EngineConfig.create(model, structured_outputs_config={"key": "x" * 1000})


def test_what_is_ignored_is_logged(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "penstock.config"):
        EngineConfig.create(model, enforce_eager=False, performance_mode="throughput")
    (message,) = caplog.messages
    assert message == "performance_mode='throughput' is an option of vLLM's that has no effect here."


@pytest.mark.parametrize("given", [{"optimization_level": 5}, {"optimization_level": "x"}, {"performance_mode": "x"}])
def test_options_without_an_effect_have_vllms_values_only(model: str, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"{name}=.* is not valid. Allowed: (0, 1, 2, 3|balanced, )"):
        EngineConfig.create(model, **given)
    for value in (0, 3, {"mode": 3}, None):
        EngineConfig.create(model, optimization_level=value)


def test_who_uses_our_own_names_does_not_pay_for_the_table() -> None:
    code = (
        "import sys; from penstock import EngineConfig, SamplingParams; "
        "EngineConfig.create('demo', block_size=32, kv_cache_memory_bytes='1GiB'); SamplingParams(top_k=3); "
        "print('tomllib' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


# The command line.


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--tensor_parallel_size=2"], {"tensor_parallel_size": 2}),
        (["-tp", "2", "-pp", "1"], {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
        (["--scheduling-policy", "priority"], {"scheduling_policy": "priority"}),
        (["--speculative-config.method", "ngram"], {"speculative_config": {"method": "ngram"}}),
        (["--attention-config", '{"method": "ngram"}'], {"attention_config": {"method": "ngram"}}),
        (["--enable-lora=false"], {"enable_lora": False}),
        (["-O3"], {"optimization_level": 3}),
        (["-O", "2"], {"optimization_level": 2}),
        (["-O.mode=3"], {"optimization_level": {"mode": 3}}),
        (["-cc.mode=3"], {"compilation_config": {"mode": 3}}),
        (
            ["--hf-overrides.rope_scaling.factor", "4.0", "--hf-overrides.rope_scaling.rope_type=yarn"],
            {"hf_overrides": {"rope_scaling": {"factor": 4.0, "rope_type": "yarn"}}},
        ),
        (["--hf-overrides", '{"rope_theta": 1e6}'], {"hf_overrides": {"rope_theta": 1e6}}),
        (["--lora-target-modules", "a", "--lora-target-modules=b"], {"lora_target_modules": ["a", "b"]}),
        (["--rope-scaling", '{"factor": 2}', "--rope_theta", "9"], {"rope_scaling": {"factor": 2}, "rope_theta": 9}),
    ],
)
def test_flags_become_options(flags: list[str], options: dict[str, Any]) -> None:
    assert parse_options(arguments_of(*flags)["engine_option"]) == options


@pytest.mark.parametrize(
    ("args", "own"),
    [
        (["--stop", "--enable-lora", "x"], {"stop": ("--enable-lora",), "prompt": "x"}),
        (["--max_tokens=3", "x"], {"max_tokens": 3, "prompt": "x"}),
        (["-m", "-tp", "x"], {"model": "-tp", "prompt": "x"}),
        (["--seed", "3", "x"], {"seed": 3, "prompt": "x"}),
        (["--json", "--", "--enable-lora"], {"json": True, "prompt": "--enable-lora"}),
        (["-"], {"prompt": "-"}),
        (["-mdemo"], {"model": "demo", "prompt": None}),
        (["--block-size", "3", "--enforce-eager", "x"], {"prompt": "x"}),
    ],
)
def test_what_is_the_commands_own_stays(args: list[str], own: dict[str, Any]) -> None:
    found = arguments_of(*args)
    assert {name: tuple(found[name]) if name == "stop" else found[name] for name in own} == own
    others = ["block_size=3", "enforce_eager=true"] if "--block-size" in args else []
    assert found["engine_option"] == others


def test_a_flag_without_its_value_is_named() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--cp-kv-cache-interleave-size"])
    assert result.exit_code == 2
    assert "'--cp-kv-cache-interleave-size' requires an argument" in " ".join(result.stderr.split())


def test_options_know_whether_they_are_flags() -> None:
    assert option_is_flag("enable_prefix_caching")
    assert option_is_flag("async_scheduling")
    assert option_is_flag("enable_chunked_prefill")
    assert option_is_flag("block_size") is False
    assert option_is_flag("gpu_memory_utilization") is False
    assert option_is_flag("zebra") is None


def test_an_unknown_flag_says_what_it_may_mean() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--blok-size", "3"])
    assert result.exit_code == 2
    assert "No such option: --blok-size. Did you mean --block-size" in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", TABLE.entries["commands"])
def test_commands_are_refused_by_feature(name: str) -> None:
    for spelled in (name, name.replace("-", "_")):
        result = CliRunner().invoke(app, [*spelled.split(), "--port", "80"])
        assert result.exit_code == 2
        assert f"The command {name} asks for {TABLE.entries['commands'][name].feature.name}" in result.stderr


def test_commands_of_the_same_or_another_name_are_there() -> None:
    for name in [*TABLE.same["commands"], *TABLE.other_names["commands"]]:
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("1GiB", 1 << 30),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("4096", 4096),
    ],
)
def test_a_size_can_have_a_unit(size: str, num_bytes: int, model: str) -> None:
    assert EngineConfig.create(model, kv_cache_memory_bytes=size).cache.kv_cache_memory_bytes == num_bytes


@pytest.mark.parametrize("size", ["", "GiB", "1XiB", "-1GiB", "0", "1 2", 0, True, 1.5, "0.1"])
def test_another_size_is_refused(size: Any, model: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=.*such as '1GiB'"):
        EngineConfig.create(model, kv_cache_memory_bytes=size)


# Parameters of requests.


@pytest.mark.parametrize("name", TABLE.same["parameters"])
def test_parameters_of_the_same_name_are_ours(name: str) -> None:
    assert name in SamplingParams.__struct_fields__


@pytest.mark.parametrize("name", [*TABLE.entries["parameters"], *TABLE.ignored["parameters"]])
def test_parameters_that_ask_for_nothing_are_left_out(name: str) -> None:
    for value in (*harmless("parameters", name), None, []):
        assert SamplingParams(**{"top_k": 3, name: value}) == SamplingParams(top_k=3)


@pytest.mark.parametrize("name", of_kind("parameters", refused=True))
def test_a_parameter_that_asks_for_a_feature_is_refused_by_its_name(name: str) -> None:
    feature = TABLE.entries["parameters"][name].feature
    for make in (lambda **fields: SamplingParams(**fields), lambda **fields: SamplingParams.from_dict(fields)):
        with pytest.raises(InvalidParameter) as raised:
            make(**{name: ASKS})
        assert isinstance(raised.value, UnsupportedFeature)
        assert f"{name}={ASKS!r} asks for {feature.name}" in str(raised.value)


@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams])
def test_a_typing_mistake_is_named(cls: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"'temprature' \(given: 1\)\. Did you mean temperature"):
        cls(temprature=1)


def test_a_missing_parameter_is_still_a_type_error() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams(max_tokens=3)  # type: ignore[call-arg]


def test_reading_parameters_from_a_message_takes_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(top_k=3, stop=["x"])
    data = msgspec.msgpack.encode(params)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(NamedParameters, "__call__", fail)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert msgspec.structs.replace(params, top_k=4).top_k == 4


@pytest.mark.parametrize("name", TABLE.entries["fields"])
def test_fields_of_a_prompt_are_harmless_or_refused(name: str) -> None:
    assert vllm.fields_as_ours({"prompt": "x", name: None}, ["prompt"]) == {"prompt": "x"}
    with pytest.raises(InvalidParameter, match=f"^{name}='{ASKS}' asks for") as raised:
        vllm.fields_as_ours({name: ASKS}, ["prompt"])
    assert isinstance(raised.value, UnsupportedFeature)


def test_parts_of_a_message_are_refused_by_feature() -> None:
    for kind in TABLE.entries["parts"]:
        with pytest.raises(UnsupportedFeature, match=f"^here of type '{kind}' asks for outputs of encoders as inputs"):
            vllm.check_kind_of_part("here", kind)
    for other in ("text", "zebra", None, 7):
        vllm.check_kind_of_part("here", other)


def test_variables_of_vllm_are_named_with_what_is_read_instead(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    EngineConfig.create(model)
    assert not caplog.records
    for name in ("VLLM_USE_V1", *TABLE.other_names["environment"]):
        monkeypatch.setenv(name, "1")
    EngineConfig.create(model)
    (record,) = caplog.records
    assert "VLLM_CPU_KVCACHE_SPACE (here: kv_cache_memory_bytes), " in record.getMessage()
    assert record.getMessage().endswith(", VLLM_USE_V1.")
    known = [*option_names(), *env._REPORTED, *(field.name for field in dataclasses.fields(ServerOptions))]
    assert set(TABLE.other_names["environment"].values()) <= set(known)


# Methods and names.


def test_methods_of_the_same_name_are_there() -> None:
    for name in TABLE.same["methods"]:
        cls, method = name.split(".")
        assert callable(getattr(getattr(penstock, cls), method))


@pytest.mark.parametrize("name", [*TABLE.entries["arguments"], *TABLE.ignored["arguments"]])
def test_arguments_of_methods_are_harmless_or_refused(name: str) -> None:
    @vllm.also_from_vllm
    def method(first: int, *, second: int = 0) -> tuple[int, int]:
        return first, second

    takes: Any = method
    for value in (*harmless("arguments", name), None, {}):
        assert takes(1, second=2, **{name: value}) == (1, 2)
    if name in TABLE.entries["arguments"]:
        with pytest.raises(InvalidParameter, match=f"^{name}='{ASKS}' asks for") as raised:
            takes(1, **{name: ASKS})
        assert isinstance(raised.value, UnsupportedFeature)


@pytest.mark.parametrize(
    ("cls", "method", "argument"),
    [
        (LLM, "generate", "trace_headers"),
        (LLM, "chat", "trace_headers"),
        (LLM, "beam_search", "trace_headers"),
        (LLM, "start_profile", "delay_iterations"),
        (AsyncEngine, "generate", "trace_headers"),
        (AsyncEngine, "abort", "trace_headers"),
        (AsyncEngine, "shutdown", "timeout"),
    ],
)
def test_methods_ask_the_table(cls: type, method: str, argument: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{argument}="):
        getattr(cls, method)(object(), **{argument: ASKS})


def test_an_unknown_argument_is_a_type_error_that_says_what_it_may_mean() -> None:
    with pytest.raises(TypeError, match=r"LLM\.generate\(\) .* 'use_tqmd'\. Did you mean use_tqdm\?"):
        LLM.generate(object(), "x", use_tqmd=False)  # type: ignore[arg-type, call-arg]


class Engine(vllm.RefusesMethods):
    """A class whose users know vLLM."""


class AsynchronousEngine(Engine):
    """A kind of it."""


@pytest.mark.parametrize("name", [name for name in TABLE.entries["methods"] if "." not in name])
def test_methods_are_refused_by_feature_and_are_not_there(name: str) -> None:
    engine: Any = AsynchronousEngine()
    assert not hasattr(engine, name)
    with pytest.raises(UnsupportedFeature) as raised:
        getattr(engine, name)
    feature = TABLE.entries["methods"][name].feature
    assert f"AsynchronousEngine.{name} asks for {feature.name}" in str(raised.value)


def test_a_method_may_be_missing_from_one_class_only() -> None:
    assert all(issubclass(cls, vllm.RefusesMethods) for cls in (LLM, AsyncEngine))
    with pytest.raises(UnsupportedFeature, match=r"^AsyncEngine\.start_profile asks for"):
        AsyncEngine.__new__(AsyncEngine).start_profile  # type: ignore[attr-defined]  # noqa: B018
    assert LLM.__new__(LLM).start_profile is not None


def test_another_attribute_is_an_attribute_error() -> None:
    for name in ("zebra", "__zebra__"):
        with pytest.raises(AttributeError, match=name) as raised:
            getattr(Engine(), name)
        assert not isinstance(raised.value, PenstockError)


@pytest.mark.parametrize("name", TABLE.entries["names"])
def test_names_of_the_package_are_refused_by_feature(name: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(f"from penstock import {name}")
    assert isinstance(raised.value, UnsupportedFeature)
    assert f"{name} asks for {TABLE.entries['names'][name].feature.name}" in str(raised.value)


def test_names_of_the_package_are_ours() -> None:
    for name in TABLE.same["names"]:
        assert name in penstock.__all__
    for name, own_name in TABLE.other_names["names"].items():
        assert getattr(penstock, name) == getattr(penstock, own_name)


def test_engine_arguments_make_an_engine() -> None:
    arguments = penstock.EngineArgs("demo", max_model_len=64, kv_cache_memory_bytes="1MiB", enforce_eager=True)
    engine = AsyncEngine.from_engine_args(arguments)
    try:
        assert arguments.model.max_model_len == 64
        assert engine.is_running
    finally:
        engine.shutdown()
