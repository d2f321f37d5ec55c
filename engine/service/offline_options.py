"""Arguments that scripts give to ``LLM``, under the names that they know from other engines.

What octavo has is an engine option. What it lacks is accepted where it asks for nothing, else refused with
the reason. Must not know what an option does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

_ONE_DEVICE = "octavo runs a model on one device"
_TEXT = "octavo generates text and gives embeddings"
_AS_IT_IS = "steps run as they are, nothing is compiled or captured"
_NO_SPECULATION = "there is no speculative decoding"
_NO_LORA = "LoRA adapters are not served"
_NOTHING: tuple[Any, ...] = (None, {}, [], ())

WITHOUT_EFFECT = frozenset(
    {
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "enforce_eager",
        "max_seq_len_to_capture",
        "max_parallel_loading_workers",
        "prefix_caching_hash_algo",
        "served_model_name",
        "trust_remote_code",  # no such code is ever run
        "use_tqdm_on_load",
    }
)
"""Change no answer, and nothing that octavo does."""

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), _ONE_DEVICE),
    "pipeline_parallel_size": ((1,), _ONE_DEVICE),
    "data_parallel_size": ((1,), _ONE_DEVICE),
    "enable_expert_parallel": ((False,), _ONE_DEVICE),
    "distributed_executor_backend": ((None, "uni", "mp"), _ONE_DEVICE),
    "tokenizer_revision": (_NOTHING, "the tokenizer is of the model's revision"),
    "hf_token": ((None, False), "set HF_TOKEN in the environment"),
    "hf_overrides": (_NOTHING, "change the model's config.json instead"),
    "load_format": (("auto", "safetensors", "gguf"), "the format follows from the model's files"),
    "tokenizer_mode": (("auto", "hf"), "the tokenizer is the model's own fast one"),
    "skip_tokenizer_init": ((False,), "texts are always made"),
    "runner": (("auto", "generate", "pooling"), _TEXT),
    "convert": (("auto", "none", "embed"), _TEXT),
    "task": ((None, "auto", "generate", "embed"), _TEXT),
    "allowed_local_media_path": ((None, ""), _TEXT),
    "allowed_media_domains": (_NOTHING, _TEXT),
    "limit_mm_per_prompt": (_NOTHING, _TEXT),
    "mm_processor_kwargs": (_NOTHING, _TEXT),
    "pooler_config": (_NOTHING, _TEXT),
    "cpu_offload_gb": ((0,), "weights stay where they are computed with"),
    "offload_group_size": ((0,), "weights stay where they are computed with"),
    "offload_num_in_group": ((1,), "weights stay where they are computed with"),
    "offload_prefetch_step": ((1,), "weights stay where they are computed with"),
    "offload_params": (_NOTHING, "weights stay where they are computed with"),
    "compilation_config": ((*_NOTHING, 0), _AS_IT_IS),
    "attention_config": (_NOTHING, "see attention_backend"),
    "profiler_config": (_NOTHING, "profile the process from outside"),
    "structured_outputs_config": (_NOTHING, "answers cannot be constrained to a grammar"),
    "quantization_config": (_NOTHING, "see quantization"),
    "logits_processors": (_NOTHING, "logits are changed by SamplingParams alone"),
    "override_generation_config": (_NOTHING, "change the model's generation_config.json"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are the model's own"),
    "kv_cache_dtype": (("auto",), "KV blocks have the type of the activations, see dtype"),
    "calculate_kv_scales": ((False,), "KV blocks have the type of the activations, see dtype"),
    "enable_chunked_prefill": ((True, None), "long prompts are always computed in chunks"),
    "async_scheduling": ((False, None), "steps run one after the other"),
    "enable_lora": ((False,), _NO_LORA),
    "speculative_config": (_NOTHING, _NO_SPECULATION),
    "spec_method": (_NOTHING, _NO_SPECULATION),
    "spec_model": (_NOTHING, _NO_SPECULATION),
    "spec_tokens": (_NOTHING, _NO_SPECULATION),
    "enable_return_routed_experts": ((False,), "there are no experts"),
    "return_sampling_mask": ((False,), "see logprobs"),
    "kv_transfer_config": (_NOTHING, "KV blocks stay in this process"),
}
"""Per name the values that ask for nothing, and why there is nothing else."""

_DTYPES = {"half": "float16", "float": "float32"}


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` as engine options.

    Raises:
        ConfigError: one asks for what octavo does not do.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in WITHOUT_EFFECT:
            continue
        if name not in NEUTRAL:
            options[name] = value
            continue
        neutral, reason = NEUTRAL[name]
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise ConfigError(f"{name}={value!r} is not offered: {reason}.")
    return {name: _translated(name, value) for name, value in options.items()}


def _translated(name: str, value: Any) -> Any:
    """A value as octavo writes it."""
    if name == "dtype":
        text = str(value).removeprefix("torch.")  # a type of PyTorch's prints so
        return _DTYPES.get(text, text)
    if name == "quantization" and value is None:
        return "auto"
    if name == "generation_config" and value == "vllm":  # "without the model's"
        return "none"
    if name in ("seed", "max_model_len") and value == -1:
        return None
    return value
