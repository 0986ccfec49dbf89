"""`penstock serve`: an OpenAI-compatible server."""

from __future__ import annotations

import time
from typing import Annotated, Any

from penstock.cli import options
from penstock.cli.failures import check_server_packages
from penstock.config.expert_stats import ExpertStatsConfig
from penstock.config.queue import QueueLimits
from penstock.config.recording import RecordingConfig
from penstock.server.options import REASONING_OPTIONS, ServerOptions
from penstock.server.processes.network import NetworkOptions
from penstock.system import env


@options.engine_command(without=(), lists=(RecordingConfig, ExpertStatsConfig))
def serve(
    *,
    model: options.Model,
    network: NetworkOptions,
    server: Annotated[dict[str, Any], ServerOptions],
    queue: QueueLimits,
    engine: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic.

    SIGTERM and Ctrl-C let running requests finish; a second one ends the server at once. --config FILE.yaml has flags
    by name. PENSTOCK_API_KEY is an API key that the list of processes does not show.
    """
    keys = (*server.pop("api_keys", ()), *env.api_keys())
    # The engine's constraints begin after the reasoning, and the server's parser splits it off.
    engine.update({name: server[name] for name in REASONING_OPTIONS if name in server})
    engine = options.with_reasoning_parser(model, engine)
    server.update({name: engine[name] for name in REASONING_OPTIONS if name in engine})
    server_options = ServerOptions(**{"served_model_name": (model,), **server}, api_keys=keys)
    check_server_packages("penstock serve")
    if server_options.otlp_traces_endpoint is not None:
        from penstock.server.tracing import check_packages

        check_packages()
    from penstock.config import EngineConfig
    from penstock.server.processes.launcher import Launcher

    began = time.monotonic()
    config = EngineConfig.create(model, **engine)
    server_options.check_folders()
    Launcher(config, server_options, network, queue, began=began).run()
