"""Write a random model that takes chats, so small that a request costs its HTTP.

    python tests/clients/tiny_model.py FOLDER

Runs where octavo and torch are installed, which the clients' environment does not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def write(folder: Path) -> None:
    """Weights, tokenizer and chat template, as a Hugging Face folder."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    from model_shapes import SHAPES
    from random_model import write_model

    write_model(folder, SHAPES["tiny"], torch.float32)
    path = folder / "tokenizer_config.json"
    tokens = json.loads(path.read_text())
    path.write_text(json.dumps({**tokens, "chat_template": TEMPLATE}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
