"""Record which beam continues which, in beam searches of a real model.

    python benchmarks/record_beams.py [--max-tokens 256] [--output benchmarks/data/beam_parents.json]

Runs the 50 prompts of ``data/beam_prompts.txt`` through the engine in this process, with widths 2, 4 and 6, end
ids ignored. Of each search the record holds the prompt's length and one string: for every step the parents of
the live beams, best beam first, a digit each. Tokens and scores are not kept. ``memory_paper.py`` replays it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.api import SamplingParams
from octavo.engine.build import build_core, find_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.scheduling.beam_search import BeamSearch, Candidates, Continuation
from octavo.engine.scheduling.request import NewRequest
from octavo.engine.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"
WIDTHS = (2, 4, 6)


@dataclass
class Recorded:
    """One search: its parents a step, once it has begun."""

    width: int
    num_prompt_tokens: int
    parents: list[str]


class Recorder:
    """Notes the results of every ``BeamSearch.advance`` of this process, by the order in which they were built."""

    def __init__(self) -> None:
        self.searches: list[BeamSearch] = []
        self.parents: dict[int, list[str]] = {}
        build, advance = BeamSearch.__init__, BeamSearch.advance

        def noted_build(search: BeamSearch, *args: Any) -> None:
            build(search, *args)
            self.searches.append(search)
            self.parents[id(search)] = []

        def noted_advance(
            search: BeamSearch, beams: Sequence[tuple[Sequence[int], Candidates]]
        ) -> list[Continuation]:
            following = advance(search, beams)
            if following:
                self.parents[id(search)].append("".join(str(c.parent) for c in following))
            return following

        BeamSearch.__init__ = noted_build  # type: ignore[method-assign,assignment]
        BeamSearch.advance = noted_advance  # type: ignore[method-assign,assignment]


def record(prompts: Sequence[str], max_tokens: int) -> tuple[str, list[Recorded]]:
    options = {"max_num_seqs": 24, "max_num_batched_tokens": 512, "max_model_len": 2048}
    config = EngineConfig.from_options(options)
    tokenizer = load_tokenizer(find_checkpoint(config))
    recorder, found = Recorder(), []
    core, info = build_core(config, 0)
    for width in WIDTHS:
        for number, prompt in enumerate(prompts):
            text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            token_ids = tokenizer.encode(text)
            sampling = SamplingParams(
                n=width, use_beam_search=True, ignore_eos=True, max_tokens=max_tokens
            )
            core.add(NewRequest(f"{width}-{number}", token_ids, sampling, 0, 0.0))
            parents = recorder.parents[id(recorder.searches[-1])]
            found.append(Recorded(width, len(token_ids), parents))
    left = len(found)
    while core.has_work:
        ended = {update.request_id for update in core.step().updates}
        left -= len(ended)
        if ended:
            print(f"{left} searches left", flush=True)
    return f"{Path(info.model).name}, {info.dtype}, {info.attention_backend} kernels", found


def write(path: Path, model: str, max_tokens: int, searches: Sequence[Recorded]) -> None:
    heads = {
        "what": "parents of live beams, a string a step, best beam first; benchmarks/record_beams.py",
        "model": model,
        "max_tokens": max_tokens,
    }
    lines = ",\n".join(
        json.dumps([one.width, one.num_prompt_tokens, " ".join(one.parents)]) for one in searches
    )
    head = json.dumps(heads, indent=0)[:-2]
    path.write_text(f'{head},\n"searches": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--output", type=Path, default=DATA / "beam_parents.json")
    args = parser.parse_args()
    prompts = (DATA / "beam_prompts.txt").read_text().splitlines()[: args.limit]
    model, searches = record(prompts, args.max_tokens)
    write(args.output, model, args.max_tokens, searches)


if __name__ == "__main__":
    main()
