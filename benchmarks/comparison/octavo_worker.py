"""octavo's ``LLM`` in a process of its own: ``python octavo_worker.py JSON`` with the keywords of ``LLM``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from worker import Request, serve

from octavo import LLM, SamplingParams


def main() -> None:
    llm = LLM(**json.loads(sys.argv[1]))

    def generate(requests: list[Request]) -> dict[str, Any]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            for _, num_tokens in requests
        ]
        begin, begin_monotonic = time.perf_counter(), time.monotonic()
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "requests": [
                {
                    "ttft": output.metrics.first_token_time - begin_monotonic,
                    "last": output.metrics.last_token_time - begin_monotonic,
                    "in": len(output.prompt_token_ids),
                    "out": len(output.outputs[0].token_ids),
                }
                for output in outputs
            ],
        }

    serve(generate)


if __name__ == "__main__":
    main()
