"""Weight transfer: a trainer sends weights to the running engine, over a group, by shared memory, in files or calls.

Always on: weights that callers load are followed, too.
"""

from __future__ import annotations

from penstock.contract.feature import Feature
from penstock.contract.memory_tags import WEIGHTS
from penstock.features.weight_transfer.messages import WeightVersion

FEATURE = Feature(
    name="weight transfers",
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
        # Of the scheduler's side alone.
        "abandon_weight_update",
        "restore_weights",
    ),
    worker_methods=(
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "weight_update_status",
        "abandon_weight_update",
        "restore_weights_after_loss",
    ),
    memory_of_methods=dict.fromkeys(("start_weight_update", "update_weights", "finish_weight_update"), (WEIGHTS,)),
)
