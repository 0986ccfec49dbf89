"""Process that measures start-up up to the first token: `python -m penstock.bench.first_token JSON`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import Any


def main(arguments: dict[str, Any]) -> dict[str, float]:
    """Print times of the monotonic clock: before the imports, after them, with the model loaded, at the first token."""
    started = time.monotonic()
    from penstock.bench.runs import run
    from penstock.config import EngineConfig
    from penstock.engine.session import Session

    imported = time.monotonic()
    with closing(Session(EngineConfig.create(arguments["model"], **arguments["options"]))) as session:
        loaded = time.monotonic()
        run(session, [arguments["prompt"]], 1)
        first_token = time.monotonic()
    return {"started": started, "imported": imported, "loaded": loaded, "first_token": first_token}


if __name__ == "__main__":
    from penstock.errors import PenstockError

    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except PenstockError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
