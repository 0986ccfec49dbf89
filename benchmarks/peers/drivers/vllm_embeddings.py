"""Embeds lines of texts with vLLM, in vLLM's own environment: JSON lists in, JSON lists of vectors out."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM

    llm = LLM(sys.argv[1], runner="pooling", dtype=sys.argv[2])
    for line in sys.stdin:
        outputs = llm.embed(json.loads(line), use_tqdm=False)
        print(json.dumps([output.outputs.embedding for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
