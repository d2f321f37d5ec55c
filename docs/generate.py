"""Writes the pages that follow from the code: ``make docs``. A test keeps them equal to it."""

from __future__ import annotations

from dataclasses import Field
from itertools import groupby
from pathlib import Path
from typing import Any

from octavo.engine.config import all_options, default_text, flag_of

HERE = Path(__file__).resolve().parent

_HEAD = """\
<!-- Written by `make docs` from engine/config.py. -->

# Configuration

Every option is a flag of `octavo serve`, a key of a preset and, but for the section *Server*, a keyword
of `octavo.LLM`. A flag beats a preset, a preset beats a default:

```bash
octavo serve --config configs/cpu-small.yaml --max-num-seqs 32
```

A preset is a YAML mapping whose keys are the flags without the leading dashes (`max-num-seqs: 32`;
underscores do too). An unknown key or a wrong value ends the start with one sentence that names it.

Sizes take the suffixes `k`, `m`, `g` (powers of 1000) and `ki`, `mi`, `gi` (powers of 1024), with or
without a final `b`: `--kv-cache-memory-bytes 2GiB`, `--max-model-len 4Ki`.

"""


def render_configuration() -> str:
    """The text of ``configuration.md``."""
    parts = [_HEAD]
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


PAGES = {"configuration.md": render_configuration}


def main() -> None:
    """Write every page."""
    for name, render in PAGES.items():
        (HERE / name).write_text(render())


if __name__ == "__main__":
    main()
