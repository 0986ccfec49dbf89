"""What an engine can do, in which arrangement of its workers and on which device: one table, made of data.

Refusals at start come from it, and `penstock env --capabilities` and `docs/capabilities.md` show it. A new arrangement
or feature takes an entry in its file, refusals in `table.py` for what it cannot, and a way to ask for it in
`tests/worker/test_capabilities.py`.
"""

from penstock.worker.capabilities.arrangements import ARRANGEMENT_GROUPS, ARRANGEMENTS, DEVICES, Arrangement
from penstock.worker.capabilities.features import FEATURES, SERVED, Feature
from penstock.worker.capabilities.missing import MISSING, Missing, require
from penstock.worker.capabilities.table import (
    REFUSALS,
    Refusal,
    allows_options,
    check_feature,
    check_options,
    refusal_of,
)

__all__ = [
    "ARRANGEMENTS",
    "ARRANGEMENT_GROUPS",
    "DEVICES",
    "FEATURES",
    "MISSING",
    "REFUSALS",
    "SERVED",
    "Arrangement",
    "Feature",
    "Missing",
    "Refusal",
    "allows_options",
    "check_feature",
    "check_options",
    "refusal_of",
    "require",
]
