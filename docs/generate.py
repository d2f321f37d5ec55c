"""Writes the pages that follow from the code: ``make docs``. A test keeps them equal to it."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import Field
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import Metric

from octavo.engine.api import Engine
from octavo.engine.checkpoint.families import families
from octavo.engine.config.options import flag_of
from octavo.engine.config.sections import all_options, default_text
from octavo.engine.models.family import Family
from octavo.server.metrics import Metrics
from octavo.server.presets import preset_names

HERE = Path(__file__).resolve().parent

_CONFIGURATION_HEAD = """\
<!-- Written by `make docs` from engine/config/. -->

# Configuration

Every option is a flag of `octavo serve`, a key of a preset and, but for the section *Server*, a keyword
of `octavo.LLM`. A flag beats a preset, a preset beats a default:

```bash
octavo serve path/to/model --config cpu-small --max-num-seqs 32
```

`--config` takes a YAML file, or the name of a preset that comes with octavo: {presets}.
Its keys are the flags without the leading dashes (`max-num-seqs: 32`; underscores do too). An unknown key
or a wrong value ends the start with one sentence that names it. The model may be given without `--model`,
as above.

Sizes take the suffixes `k`, `m`, `g` (powers of 1000) and `ki`, `mi`, `gi` (powers of 1024), with or
without a final `b`: `--kv-cache-memory-bytes 2GiB`, `--max-model-len 4Ki`.

"""


def render_configuration() -> str:
    """The text of ``configuration.md``."""
    presets = ", ".join(f"`{name}`" for name in preset_names())
    parts = [_CONFIGURATION_HEAD.replace("{presets}", presets)]
    for section, options in groupby(all_options(), key=lambda pair: pair[0]):
        rows = "".join(_row(option_field) for _, option_field in options)
        parts.append(
            f"## {section}\n\n| Flag | Meaning | Values | Default |\n|---|---|---|---|\n{rows}\n"
        )
    return "".join(parts).rstrip("\n") + "\n"


def _row(option_field: Field[Any]) -> str:
    cells = (
        f"`{flag_of(option_field.name)}`",
        option_field.metadata["help"],
        _values(option_field.metadata),
        default_text(option_field),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _values(meta: Any) -> str:
    if meta["choices"]:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    kinds = {"str": "text", "strs": "one or more", "int": "integer", "float": "number"}
    kinds |= {"size": "size", "bool": "switch"}
    text = kinds[meta["kind"]] + (f" in {meta['unit']}" if meta["unit"] else "")
    least, most = meta["least"], meta["most"]
    if least is not None and most is not None:
        return f"{text}, {least:g} to {most:g}"
    return text if least is None else f"{text}, at least {least:g}"


_METRICS_HEAD = """\
<!-- Written by `make docs` from the registry of server/metrics.py. -->

# Metrics

`GET /metrics` is Prometheus' text format, rendered from memory; a scrape never asks the engine. Names with
`vllm:` are the ones that dashboards, autoscalers and gateways of this ecosystem read, with their labels and
buckets; names with `octavo:` exist here only. Both carry the labels `model_name` and `engine`, unless the
table says otherwise.

Counters never fall: the engine reports cumulative values of its life, and the server adds differences.
A cached block that no sequence refers to counts as free. The usual `process_*` and `python_gc_*` metrics
of the server's own process are there too.

"""
_GROUPS = (
    ("Names shared with the ecosystem", ("vllm:",)),
    ("octavo's own", ("octavo:",)),
    ("HTTP", ("http_",)),
)


def render_metrics() -> str:
    """The text of ``metrics.md``."""
    parts, families = [_METRICS_HEAD], metric_families()
    for title, prefixes in _GROUPS:
        rows = "".join(_metric_row(f) for f in families if f.name.startswith(prefixes))
        parts.append(
            f"## {title}\n\n| Name | Type | Further labels | Meaning |\n|---|---|---|---|\n{rows}\n"
        )
    return "".join(parts).rstrip("\n") + "\n"


def metric_families() -> list[Metric]:
    """Every metric of a server whose engine is ready, by name."""
    info = SimpleNamespace(
        max_model_len=8192,
        block_size=16,
        num_blocks=1024,
        kv_cache_bytes=1 << 20,
        num_kv_tokens=16384,
        kv_concurrency=2.0,
        num_host_blocks=0,
        enable_prefix_caching=True,
        dtype="float32",
    )
    engine = cast(Engine, SimpleNamespace(info=info, num_restarts=0))
    metrics = Metrics(engine, "model")
    metrics.render()  # makes those that wait for the engine
    metrics.http.observe("/v1/completions", "POST", 200, 0.0)
    return sorted(metrics.registry.collect(), key=lambda family: family.name)


def _metric_row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
    if family.name.startswith(("vllm:", "octavo:")):
        further = [label for label in labels if label not in ("model_name", "engine", "le")]
        if "model_name" not in labels:
            further.append("no `model_name`")
        if "engine" not in labels:
            further.append("no `engine`")
    else:
        further = [label for label in labels if label != "le"]
    shown = ", ".join(label if "`" in label else f"`{label}`" for label in further)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |\n"


def render_roofline() -> str:
    """The text of ``roofline.md``, by ``benchmarks/roofline.py``, which is no part of the package."""
    spec = importlib.util.spec_from_file_location(
        "octavo_roofline", HERE.parent / "benchmarks" / "roofline.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(str, module.render())


_MODELS_HEAD = """\
<!-- Written by `make docs` from engine/models/families/ and tests/models/. -->

# Models

octavo runs the decoder-only models below, from a Hugging Face folder (safetensors) or, where the table names
an architecture of llama.cpp, from a GGUF file. A feature that a model's configuration asks for and octavo does not
compute is refused by name, and so is a tensor that holds NaN or infinity. A folder's experts may be stored one by
one or fused, as transformers 5 keeps them (`experts.gate_up_proj`). [Other decoders](#any-other-decoder) run through
transformers. To add one: [Add a model](../CONTRIBUTING.md).

Every family is verified against transformers: tiny models with random weights, norms and biases, in float32, whose
logits must agree within `max|a - b| <= 1e-4 * max|b|` in one piece, in odd chunks, decoding, in batches and after a
prefix hit; with the reference kernels, the PyTorch kernels and the native CPU kernels. *Greedy* means 64
greedy tokens through the whole engine, *GGUF* the same logits from a GGUF file.

| Models | Class in transformers | What it adds | GGUF | Verified |
|---|---|---|---|---|
"""

_MODELS_TAIL = """
## Rotary position embedding

The scalings `linear`, `llama3`, `yarn`, `longrope` and `dynamic` of `rope_parameters` (or `rope_scaling`) are read as
transformers reads them, attention factors included, and compared with its angles at every position. Two of them let
the length of a sequence change the angles of all its tokens. Keys that are cached, and shared by sequences of any length,
cannot follow; so octavo decides once, by the longest sequence that it admits:

- `longrope`: the long factors if `--max-model-len` (by default the model's window) is more than
  `original_max_position_embeddings`, else the short ones. The log says which. transformers takes the short ones for each
  sequence up to the original window; to have these, serve with `--max-model-len` no larger than it.
- `dynamic`: scaling starts past `max_position_embeddings`, and octavo refuses a `--max-model-len` past it. Up to there
  the angles are the plain ones, as they are in transformers.

With `yarn`, the model's window is `factor * original_max_position_embeddings` if `max_position_embeddings` is less: files
in which it was turned on by hand leave the latter as it was.

## Any other decoder

A Hugging Face folder whose architecture is not in the table runs through the class that the installed transformers
has for it (`pip install 'octavo[transformers]'`), with octavo's paged attention as its attention function: batched,
paged, in chunks and with prefix hits like the others, float32 logits included. `--model-impl transformers` runs a
model of the table so too, `--model-impl octavo` refuses what is not in it. Linear layers, embeddings and the head are
computed by octavo's kernels, the rest by the class (with routed experts, bits may depend on what is computed beside);
code that comes with a model is never run.

When such a model is loaded, its layers are asked what attention they want, and two short sequences must have, in
pieces and beside each other, the logits that the class gives each alone with its own attention. What cannot run so
is refused with a sentence that names why:

- GGUF files, quantised weights, encoder-decoders, models with parts for images or sound;
- classes that do not let their attention be replaced (StableLM, BLOOM, Falcon in transformers 5.24), and models whose
  own code would be needed;
- layers of other kinds (state spaces, linear or chunked attention), multi-head latent attention, keys and values of
  different sizes, layers that differ in their heads;
- positions inside the mask (ALiBi); rope types that follow the longest sequence of a batch (`dynamic`, `longrope`);
- windows that the configuration speaks of and the attention function is not given; attention sinks where the kernels
  have none (those of the CPU).

Verified as the families are ([test_transformers_impl.py](../tests/models/test_transformers_impl.py)): {variants}; and
of the table Llama, Qwen3 and Gemma 2.

It is slower than a family of octavo's: the class's steps are many small ones. {speed}
"""

_SPEED = """\
A model of SmolLM2-135M's shape with random
weights, on one core of a CPU, generated 1.5 times as many tokens a second by octavo's own code in float32 and 2.2 times
as many in bfloat16; with eight streams 1.6 and 2.1 times (medians of five turns of
`python benchmarks/model_impl.py --dtype float32 --repeats 5`, and of the same with `bfloat16`)."""


def render_models() -> str:
    """The text of ``models.md``."""
    rows = "".join(_model_row(family) for family in families())
    variants = "; ".join(_variants("transformers_impl"))
    tail = _MODELS_TAIL.replace("{variants}", variants).replace("{speed}", _SPEED)
    return _MODELS_HEAD + rows + tail


def _model_row(family: Family) -> str:
    name = type(family).__module__.rpartition(".")[2]
    cells = (
        family.models,
        ", ".join(f"`{architecture}`" for architecture in family.architectures),
        (family.__doc__ or "").splitlines()[0],
        f"`{family.gguf_architecture}`" if family.gguf_architecture else "",
        f"[test_{name}.py](../tests/models/test_{name}.py): {', '.join(_checks(name))}",
    )
    return "| " + " | ".join(cells) + " |\n"


def _checks(name: str) -> list[str]:
    """What a family's test file compares, by the names of its tests and variants."""
    module = ast.parse((HERE.parent / "tests" / "models" / f"test_{name}.py").read_text())
    tests = " ".join(node.name for node in module.body if isinstance(node, ast.FunctionDef))
    return [
        f"logits of {_num_variants(module)} variants",
        *(["greedy"] if "greedy" in tests else []),
        *(["GGUF"] if "gguf" in tests else []),
    ]


def _variants(name: str) -> list[str]:
    """What a test file compares, by the names of its variants."""
    table = _table(ast.parse((HERE.parent / "tests" / "models" / f"test_{name}.py").read_text()))
    return [ast.literal_eval(key) for key in table.keys if key is not None]


def _num_variants(module: ast.Module) -> int:
    return len(_table(module).keys)


def _table(module: ast.Module) -> ast.Dict:
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "VARIANTS":
            assert isinstance(node.value, ast.Dict)
            return node.value
    raise ValueError("a family's test file has a table of VARIANTS")


PAGES = {
    "configuration.md": render_configuration,
    "metrics.md": render_metrics,
    "models.md": render_models,
    "roofline.md": render_roofline,
}


def main() -> None:
    """Write every page."""
    for name, render in PAGES.items():
        (HERE / name).write_text(render())


if __name__ == "__main__":
    main()
