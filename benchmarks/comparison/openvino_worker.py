"""OpenVINO GenAI in a process of its own: ``python openvino_worker.py JSON``, in its own environment.

The JSON has ``model`` (a GGUF file), ``precision`` (of activations), ``num_threads``, ``kv_gib`` and
``max_num_batched_tokens``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import numpy as np
import openvino
import openvino_genai
from worker import Request, serve


def build(options: dict[str, Any]) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options["kv_gib"]
    scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": options["precision"],
        "INFERENCE_NUM_THREADS": options["num_threads"],
        **options.get("properties", {}),
    }
    return openvino_genai.ContinuousBatchingPipeline(
        options["model"], scheduler_config=scheduler, device="CPU", properties=properties
    )


def greedy(num_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def main() -> None:
    pipeline = build(json.loads(sys.argv[1]))

    def generate(requests: list[Request]) -> dict[str, Any]:
        begin = time.perf_counter()
        handles = [
            pipeline.add_request(
                number, openvino.Tensor(np.array([prompt], dtype=np.int64)), greedy(num_tokens)
            )
            for number, (prompt, num_tokens) in enumerate(requests)
        ]
        times: list[list[float]] = [[] for _ in requests]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - begin
            for seen, handle in zip(times, handles, strict=True):
                if handle.can_read():
                    for part in handle.read().values():
                        seen.extend([now] * len(part.generated_ids))
        return {
            "seconds": time.perf_counter() - begin,
            "requests": [
                {"ttft": seen[0], "last": seen[-1], "in": len(prompt), "out": len(seen)}
                for seen, (prompt, _) in zip(times, requests, strict=True)
            ],
        }

    serve(generate)


if __name__ == "__main__":
    main()
