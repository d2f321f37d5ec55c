"""Flags that people bring from other servers and that octavo does not have.

Each is answered with what to do instead, or with why there is nothing to do.
"""

from __future__ import annotations

_ONE_DEVICE = "octavo runs a model on one device"
_ONE_SERVER = "octavo has one front end and one engine"
_TEXT_CODE = "octavo never runs code that comes with a model"
_NO_LORA = "LoRA adapters are not served"
_NO_SPECULATION = "there is no speculative decoding"
_NO_TOOLS = "tool calls are not parsed"
_NO_REASONING = "reasoning is not told apart from the answer"
_NO_GRAMMAR = "answers cannot be constrained to a grammar"
_NO_COMPILE = "steps run as they are, nothing is compiled or captured"
_NO_TRANSFER = "KV blocks stay in this process"
_SWAP = "host memory for KV blocks is given by --swap-space"
_RAW_LOGPROBS = "log-probabilities are the model's own, before penalties, bias and filters"
_FORMAT = "the format follows from the model's files, safetensors or GGUF"
_PROXY = "put a reverse proxy in front for this"
_NO_TRACING = "there are no traces; /metrics has the numbers"
_BOTH_TASKS = "every model generates text and gives embeddings"
_SILENT = "nothing of the kind is logged"
_IN_BODY = "clients ask for it in the request"

PEER_FLAGS: dict[str, str] = {
    # model and loading
    "--tokenizer-mode": "the tokenizer is the model's own fast one",
    "--trust-remote-code": _TEXT_CODE,
    "--tokenizer-revision": "the tokenizer is of the model's revision",
    "--hf-token": "set HF_TOKEN in the environment, which no list of processes shows",
    "--hf-overrides": "change the model's config.json instead",
    "--override-generation-config": "change the model's generation_config.json, or see "
    "--generation-config",
    "-q": _FORMAT,
    "--load-format": _FORMAT,
    "--safetensors-load-strategy": _FORMAT,
    "--enforce-eager": _NO_COMPILE,
    "--logprobs-mode": _RAW_LOGPROBS,
    "--task": _BOTH_TASKS,
    "--runner": _BOTH_TASKS,
    "--convert": _BOTH_TASKS,
    "--pooler-config": "the kind of pooling is given by --pooling-type, or in the request",
    # cache
    "--kv-cache-dtype": "KV blocks have the type of the activations, see --dtype",
    "--prefix-caching-hash-algo": "blocks are always found by a cryptographic hash",
    "--kv-offloading-size": f"{_SWAP}, in GiB too",
    "--kv-offloading-backend": _SWAP,
    "--cpu-offload-gb": f"weights stay on their device; {_SWAP}",
    # scheduling
    "--enable-chunked-prefill": "long prompts are always computed in chunks, see "
    "--max-num-batched-tokens",
    "--long-prefill-token-threshold": "see --max-num-batched-tokens",
    "--async-scheduling": "steps run one after the other",
    "--stream-interval": "every token is sent as it comes",
    "--scheduler-reserve-full-isl": "see --watermark",
    # parallel
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_SERVER,
    "-dp": _ONE_SERVER,
    "--data-parallel-address": _ONE_SERVER,
    "--data-parallel-rpc-port": _ONE_SERVER,
    "--data-parallel-size-local": _ONE_SERVER,
    "--data-parallel-backend": _ONE_SERVER,
    "--enable-expert-parallel": _ONE_DEVICE,
    "-ep": _ONE_DEVICE,
    "--nnodes": _ONE_DEVICE,
    "--node-rank": _ONE_DEVICE,
    "--master-addr": _ONE_DEVICE,
    "--headless": _ONE_SERVER,
    "--api-server-count": _ONE_SERVER,
    "-asc": _ONE_SERVER,
    "--distributed-executor-backend": _ONE_DEVICE,
    # adapters, speculation, tools
    "--enable-lora": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--max-lora-rank": _NO_LORA,
    "--max-cpu-loras": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--speculative-config": _NO_SPECULATION,
    "-sc": _NO_SPECULATION,
    "--spec-method": _NO_SPECULATION,
    "--spec-model": _NO_SPECULATION,
    "--spec-tokens": _NO_SPECULATION,
    "--structured-outputs-config": _NO_GRAMMAR,
    "--guided-decoding-backend": _NO_GRAMMAR,
    "--enable-auto-tool-choice": _NO_TOOLS,
    "--tool-call-parser": _NO_TOOLS,
    "--tool-parser-plugin": _NO_TOOLS,
    "--reasoning-parser": _NO_REASONING,
    "--chat-template-content-format": "content parts are always joined to one string",
    "--default-chat-template-kwargs": "clients send chat_template_kwargs",
    "--trust-request-chat-template": "chat templates come from the operator, see --chat-template",
    # compilation, transfer
    "--compilation-config": _NO_COMPILE,
    "-cc": _NO_COMPILE,
    "-O": _NO_COMPILE,
    "--optimization-level": _NO_COMPILE,
    "--cudagraph-capture-sizes": _NO_COMPILE,
    "--max-cudagraph-capture-size": _NO_COMPILE,
    "--kv-transfer-config": _NO_TRANSFER,
    "--kv-events-config": _NO_TRANSFER,
    # front end
    "--middleware": _PROXY,
    "--ssl-cert-reqs": "clients must show a certificate where --ssl-ca-certs is given",
    "--ssl-ciphers": "ciphers are those of Python's default context",
    "--enable-ssl-refresh": "restart the server for another certificate",
    "--uvicorn-log-level": "see --log-level",
    "--disable-uvicorn-access-log": "there is no access log",
    "--disable-access-log-for-endpoints": "there is no access log",
    "--enable-request-id-headers": "X-Request-Id is always sent back",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--enable-force-include-usage": _IN_BODY + ", by stream_options.include_usage",
    "--enable-server-load-tracking": "/load always counts",
    "--enable-per-request-metrics": "see /metrics",
    "--disable-log-requests": _SILENT,
    "--enable-log-outputs": _SILENT,
    "--max-log-len": _SILENT,
    "--return-tokens-as-token-ids": _IN_BODY + ", by return_tokens_as_token_ids",
    "--response-role": "answers have the role assistant",
    "--disable-fastapi-docs": "/docs is guarded by --api-key",
    "--enable-sleep-mode": "the engine does not sleep",
    # observability
    "--otlp-traces-endpoint": _NO_TRACING,
    "--collect-detailed-traces": _NO_TRACING,
    "--disable-log-stats": "statistics are at /metrics and are not logged",
    "--kv-cache-metrics": "every block is always measured, see /metrics",
    "--kv-cache-metrics-sample": "every block is always measured, see /metrics",
    "--custom-histogram-buckets": "buckets are those of the ecosystem's dashboards",
    "--show-hidden-metrics-for-version": "no metric is hidden",
    "--enable-mfu-metrics": "there are no such metrics",
    "--profiler-config": "profile the processes from outside",
}
