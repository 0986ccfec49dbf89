"""Workers of one machine that communicate as those of several machines do."""

from __future__ import annotations

import os

from penstock.config import EngineConfig
from penstock.parallel import ParallelState
from penstock.parallel.connections import RankConnections, open_store
from penstock.parallel.distributed_ranks import join_connected_ranks
from penstock.worker.worker import Worker

HOST = "127.0.0.1"
# The environment's variable for the port of the store that the test keeps.
PORT = "GLOO_WORKER_PORT"


class GlooWorker(Worker):
    """Worker with a gloo process group instead of shared memory."""

    def __init__(self, config: EngineConfig, parallel: ParallelState) -> None:
        store = open_store(HOST, int(os.environ[PORT]), is_host=False)
        self.connections = RankConnections(store, parallel.rank, parallel.world_size, address=HOST, timeout_s=60.0)
        super().__init__(config, join_connected_ranks(self.connections, config.parallel))

    def shutdown(self) -> None:
        super().shutdown()
        self.connections.close()
