"""Sleep: an engine that gives the memory of its weights and its KV cache back, and its pauses."""

from __future__ import annotations

from penstock.contract.feature import Feature

FEATURE = Feature(
    name="sleep",
    deployment_side="penstock.features.sleep.deployment:SleepDeployment",
    scheduler_side="penstock.features.sleep.scheduling:SleepScheduling",
    worker_side="penstock.features.sleep.worker:SleepWorker",
    deployment_methods=(
        "sleep",
        "wake_up",
        "is_sleeping",
        "pause",
        "resume",
        "is_paused",
        "engine_state",
        # Of the scheduler's side alone.
        "clear_cache",
        "reserve_sleep",
        "cancel_sleep",
        "why_not_wake_up",
    ),
    worker_methods=(
        "reserve_sleep",
        "cancel_sleep",
        "sleep",
        "why_not_wake_up",
        "wake_up",
        "undefine_weights",
        "why_weights_undefined",
    ),
)
