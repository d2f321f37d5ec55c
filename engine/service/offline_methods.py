"""Methods of other engines' classes that ``LLM`` lacks."""

from __future__ import annotations

ABSENT = {
    "encode": "octavo generates text; see also embed()",
    "classify": "there are no classifiers",
    "score": "there are no cross-encoders",
    "get_metrics": "stats() has the engine's counters and gauges",
    "collective_rpc": "the model runs in this process",
    "apply_model": "the model runs in this process",
    "start_profile": "profile this process from outside",
    "stop_profile": "profile this process from outside",
    "sleep": "close() gives back the model's memory",
    "wake_up": "the engine does not sleep",
    "release_kv_cache_memory": "close() gives back all memory",
    "reset_mm_cache": "there is no cache but that of prefixes",
    "from_engine_args": "options are arguments of LLM()",
    "init_weight_transfer_engine": "weights stay as they are",
    "start_weight_update": "weights stay as they are",
    "update_weights": "weights stay as they are",
    "finish_weight_update": "weights stay as they are",
}
"""Methods that other engines have, and why there is none here."""
