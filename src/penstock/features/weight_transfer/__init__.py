"""Weight transfer: a trainer sends weights to the running engine, over a group, by shared memory, or in files."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature
from penstock.contract.memory_tags import WEIGHTS
from penstock.features.weight_transfer.messages import WeightVersion


def _has_trainer(config: EngineConfig) -> bool:
    return config.weight_transfer.backend is not None


FEATURE = Feature(
    name="weight transfers",
    is_on=_has_trainer,
    how_to_turn_on="Start the engine with weight_transfer_config, such as {'backend': 'gloo'}.",
    parts=(WeightVersion,),
    deployment_side="penstock.features.weight_transfer.deployment:WeightTransferDeployment",
    scheduler_side="penstock.features.weight_transfer.scheduling:WeightTransferScheduling",
    worker_side="penstock.features.weight_transfer.worker:WeightTransferWorker",
    deployment_methods=(
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "weight_update_status",
        "get_weight_version",
    ),
    worker_methods=(
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "weight_update_status",
        "restore_weights_after_loss",
    ),
    memory_of_methods=dict.fromkeys(("start_weight_update", "update_weights", "finish_weight_update"), (WEIGHTS,)),
)
