"""KV memory as virtual memory, on the real engine: run it, and read what it prints.

    python examples/virtual_memory.py

Loads the embedded model once, with a pool of 48 blocks, and looks at the memory between two steps. Every
number and every picture is made from ``kv_snapshot()`` and ``stats()``; a server that was started with
``--enable-debug-endpoints`` answers ``GET /debug/kv`` with the same. docs/virtual-memory.md explains the terms.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from octavo.engine.api import KVBlock, KVSequence, KVSnapshot, SamplingParams
from octavo.engine.build import build_core, find_checkpoint
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.scheduling.request import NewRequest
from octavo.engine.text.tokenizer import load_tokenizer

WIDTH = 100
GRID_COLUMNS = 16
SLOTS_PER_CHAR = 8  # in bars
OPTIONS = {
    "num_gpu_blocks_override": 48,
    "max_model_len": 384,
    "dtype": "float32",  # auto is bfloat16 on some processors, and gives other texts there
    "check_invariants": True,
}

STORY = """\
The old printer of the harbour town owned one large press and very little room. Every sheet that left it was
folded three times, so that it made eight leaves, and sixteen pages in all; he called such a piece an octavo. In
the beginning he kept a whole shelf free for each book he had agreed to print, since nobody could tell him
how long the author would go on. Most books were short. The shelves stood half empty, and yet he had to
send people away, because every shelf had somebody's name on it. One winter evening his apprentice asked why
the sheets of a book had to lie side by side at all. A list could say where each sheet was; then any free place
would do. They tried it the next day. Each book got a slip of paper, and on it, line by line, the number of
the place where the next sheet lay. Two books that began with the same chapter could even point at the same
sheets, until one of the authors changed his mind and wanted a word altered; then that one sheet was printed
again, and only his slip was corrected. When a book was finished its places were free, but the sheets stayed
there until the room was needed, for readers often came back and asked for the same first chapter. Soon the
shop printed four times as many books as before, in the same small room, with the same old press."""
WORDS = STORY.split()

Lines = Iterator[str]


class Lab:
    """An engine in this process, and what has been written in it so far."""

    def __init__(self, config: EngineConfig) -> None:
        self.core, self.info = build_core(config, 0)
        self.tokenizer = load_tokenizer(find_checkpoint(config))
        self.token_ids: dict[tuple[str, int], list[int]] = {}
        """Prompt and output of each child of each request."""
        self.num_cached_tokens: dict[str, int] = {}
        self._running: set[str] = set()
        self._prompts: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: str, sampling: SamplingParams) -> int:
        """Queue a request; returns the number of its prompt's tokens."""
        prompt_ids = self.tokenizer.encode(prompt)
        self.core.add(NewRequest(request_id, prompt_ids, sampling, 0, time.monotonic()))
        self._prompts[request_id] = prompt_ids
        self._running.add(request_id)
        return len(prompt_ids)

    def step(self, num_steps: int = 1) -> None:
        """Run the engine, and note what it writes."""
        for _ in range(num_steps):
            for update in self.core.step().updates:
                key = update.request_id, update.child_index
                prompt_ids = self._prompts[update.request_id]
                if key not in self.token_ids:
                    self.token_ids[key] = list(prompt_ids)
                    self.num_cached_tokens[update.request_id] = update.num_cached_tokens
                self.token_ids[key] += update.token_ids
                if update.finish_reason is not None:
                    self._running.discard(update.request_id)

    def finish(self, *request_ids: str) -> None:
        """Run until these requests have ended."""
        while self._running.intersection(request_ids):
            self.step()

    def clear(self) -> None:
        """End what runs and forget what is cached: the next section begins in empty memory."""
        self.core.abort(sorted(self._running))
        self._running.clear()
        while self.core.has_work:
            self.core.step()
        self.core.reset_prefix_cache()
        self.token_ids.clear()

    def text(self, token_ids: Sequence[int]) -> str:
        """These tokens' text on one line, in quotes."""
        return quoted(self.tokenizer.decode(token_ids))


def greedy(max_tokens: int) -> SamplingParams:
    """Always the most likely token, and exactly so many of them."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def excerpt(first_word: int, num_words: int) -> str:
    """A piece of the story, which begins again after its end."""
    return " ".join(WORDS[(first_word + i) % len(WORDS)] for i in range(num_words))


# --- facts of a snapshot ------------------------------------------------------------------------------


def used_blocks(snapshot: KVSnapshot) -> list[KVBlock]:
    return [block for block in snapshot.blocks if block.ref_count]


def sequences_of(snapshot: KVSnapshot, request_id: str) -> list[KVSequence]:
    return [s for s in snapshot.sequences if s.request_id == request_id]


def labels_of(snapshot: KVSnapshot) -> dict[int, str]:
    """A letter for each sequence: its request's name, or x, y, z for the sequences of one request."""
    labels = {}
    for sequence in snapshot.sequences:
        family = [s.seq_id for s in sequences_of(snapshot, sequence.request_id)]
        alone = len(family) == 1
        labels[sequence.seq_id] = (
            sequence.request_id if alone else "xyzuvw"[family.index(sequence.seq_id)]
        )
    return labels


class Copied(NamedTuple):
    """A block table's entry that points elsewhere than before."""

    seq_id: int
    logical: int
    source: int
    target: int


def copied_blocks(before: KVSnapshot, after: KVSnapshot) -> list[Copied]:
    """Entries that changed while their sequence went on: copies on write."""
    tables = {s.seq_id: s.block_table for s in before.sequences}
    return [
        Copied(s.seq_id, logical, source, target)
        for s in after.sequences
        for logical, (source, target) in enumerate(
            zip(tables.get(s.seq_id, ()), s.block_table, strict=False)
        )
        if source != target
    ]


def waste(num_filled: int, num_reserved: int) -> str:
    return f"{100 * (num_reserved - num_filled) / num_reserved:.1f}%"


# --- pictures -----------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """A text in quotes, with its line ends visible."""
    return '"' + text.replace("\n", "\\n") + '"'


def clipped(line: str) -> str:
    """A line that is not too long for the terminal."""
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + '..."'


def heading(number: int, title: str) -> Lines:
    yield from ("", f"{number}. {title}", "=" * (len(title) + 3), "")


def paragraph(text: str) -> Lines:
    yield from textwrap.wrap(" ".join(text.split()), WIDTH)


def entry(name: str, text: str) -> Lines:
    """A name and a text that may go on below it."""
    indent = " " * (len(name) + 3)
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {name} ", subsequent_indent=indent)


def pool_grid(snapshot: KVSnapshot) -> Lines:
    """The pool, block by block, and a line that explains the cells."""
    labels = labels_of(snapshot)
    index_of = {(s.seq_id, b): i for s in snapshot.sequences for i, b in enumerate(s.block_table)}
    for start in range(0, snapshot.num_blocks, GRID_COLUMNS):
        row = snapshot.blocks[start : start + GRID_COLUMNS]
        cells = [_cell(block, labels, index_of) for block in row]
        yield f"  {start:3} |" + "".join(f"{cell:>5}" for cell in cells)
    yield ""
    yield "  A2: logical block 2 of A   xy: shared by x and y   ~ : free, still findable   . : free"


def _cell(
    block: KVBlock, labels: Mapping[int, str], index_of: Mapping[tuple[int, int], int]
) -> str:
    owners = "".join(labels[seq_id] for seq_id in block.seq_ids)
    if len(block.seq_ids) == 1:
        return f"{owners}{index_of[block.seq_ids[0], block.id]}"
    return owners or ("~" if block.is_cached else ".")


def sharing_table(snapshot: KVSnapshot, sequences: Sequence[KVSequence]) -> Lines:
    """A row for each sequence: the physical block of each logical one, and how many point at it."""
    labels = labels_of(snapshot)
    longest = max(len(s.block_table) for s in sequences)
    yield "  logical    " + "".join(f"{index:>9}" for index in range(longest))
    for sequence in sequences:
        blocks = [snapshot.blocks[block_id] for block_id in sequence.block_table]
        cells = "".join(f"{f'{b.id} (x{b.ref_count})':>9}" for b in blocks)
        yield f"  beam {labels[sequence.seq_id]}     {cells}"


def bar(num_filled: int, num_reserved: int) -> str:
    """Reserved slots; a character counts as filled when all its slots are."""
    filled = num_filled // SLOTS_PER_CHAR
    return "#" * filled + "-" * (num_reserved // SLOTS_PER_CHAR - filled)


# --- the sections -------------------------------------------------------------------------------------


def one_sequence(lab: Lab) -> Lines:
    yield from heading(1, "One sequence: contiguous to itself, scattered in memory")
    for name, first_word, num_words, max_tokens in (
        ("A", 20, 40, 90),
        ("B", 60, 55, 4),
        ("D", 90, 20, 90),
        ("E", 130, 60, 6),
    ):
        lab.add(name, excerpt(first_word, num_words), greedy(max_tokens))
        lab.step(2)
    lab.finish("B", "E")
    lab.core.reset_prefix_cache()
    num_prompt_tokens = lab.add("C", excerpt(0, 30), greedy(60))
    lab.step(50)

    snapshot, token_ids = lab.core.kv_snapshot(), lab.token_ids["C", 0]
    (sequence,) = sequences_of(snapshot, "C")
    yield from paragraph(
        f"""B and E came and went; A and D still run. C has a prompt of {num_prompt_tokens} tokens and
        {sequence.num_tokens} tokens in memory by now. It sees one long text:"""
    )
    yield ""
    yield from logical_view(lab, snapshot, sequence, token_ids)
    yield ""
    yield from paragraph("The pool, 16 blocks a row, as it really is at this moment:")
    yield ""
    yield from pool_grid(snapshot)
    yield ""
    yield from paragraph(f"C's block table is all that joins the two: {[*sequence.block_table]}.")
    yield from translation(lab, snapshot.block_size, sequence, token_ids, position=37)


def logical_view(
    lab: Lab, snapshot: KVSnapshot, sequence: KVSequence, token_ids: Sequence[int]
) -> Lines:
    yield "  logical  physical  filled  text"
    size = snapshot.block_size
    for index, block_id in enumerate(sequence.block_table):
        end = min((index + 1) * size, sequence.num_tokens)
        text = lab.text(token_ids[index * size : end])
        filled = snapshot.blocks[block_id].num_filled
        yield clipped(f"  {index:>7}  {block_id:>8}  {filled:>3}/{size}  {text}")


def translation(
    lab: Lab, size: int, sequence: KVSequence, token_ids: Sequence[int], position: int
) -> Lines:
    index, offset = divmod(position, size)
    block_id = sequence.block_table[index]
    yield f"Where is position {position}, the token {lab.text([token_ids[position]])}?"
    yield f"  logical block   {position} // {size} = {index}"
    yield f"  offset          {position} % {size} = {offset}"
    yield f"  physical block  block_table[{index}] = {block_id}"
    yield f"  slot            {block_id} * {size} + {offset} = {block_id * size + offset}"


class Reservation(NamedTuple):
    """How some way to hand out memory treats the requests."""

    name: str
    reserved: list[int]  # slots for each request

    def num_fitting(self, num_slots: int) -> int:
        """How many of the requests, in their order, fit into so many slots together."""
        total = 0
        for number, slots in enumerate(self.reserved):
            total += slots
            if total > num_slots:
                return number
        return len(self.reserved)


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def different_lengths(lab: Lab) -> Lines:
    yield from heading(2, "Eight requests of different lengths: paged and contiguous")
    num_words = (6, 38, 10, 90, 26, 16, 76, 70)
    outputs = (24, 40, 18, 34, 48, 20, 36, 33)
    prompts = [
        lab.add(name, excerpt(24 * number, words), greedy(output))
        for number, (name, words, output) in enumerate(
            zip("ABCDEFGH", num_words, outputs, strict=True)
        )
    ]
    num_steps = 16
    lab.step(num_steps)
    snapshot, window = lab.core.kv_snapshot(), lab.info.max_model_len
    size = snapshot.block_size
    yield from paragraph(
        f"""All eight run, and each has written {num_steps} tokens. Left: the blocks that each holds. Right: what a
        system must reserve that keeps a sequence in one piece and does not know how long it will be:
        max_model_len, here {window}. One character is {SLOTS_PER_CHAR} slots; # is filled, - is empty."""
    )
    yield ""
    yield f"     tokens  {'paged':<22}contiguous"
    for s in snapshot.sequences:
        paged = bar(s.num_tokens, len(s.block_table) * size)
        yield f"  {s.request_id}  {s.num_tokens:>6}  {paged:<22}{bar(s.num_tokens, window)}"
    yield ""
    yield from reservations(snapshot, window, prompts, outputs)


def reservations(
    snapshot: KVSnapshot, window: int, prompts: Sequence[int], outputs: Sequence[int]
) -> Lines:
    size, num_slots = snapshot.block_size, snapshot.num_blocks * snapshot.block_size
    powers = [p + next_power_of_two(o) for p, o in zip(prompts, outputs, strict=True)]
    num_filled = sum(block.num_filled for block in used_blocks(snapshot))
    yield "  memory                             reserved   filled   waste   fit in the pool"
    for one in (
        Reservation("paged", [len(s.block_table) * size for s in snapshot.sequences]),
        Reservation("prompt + next power of two", powers),
        Reservation("max_model_len", [window] * len(prompts)),
    ):
        reserved, fitting = sum(one.reserved), one.num_fitting(num_slots)
        yield (
            f"  {one.name:<33}{reserved:>10}{num_filled:>9}{waste(num_filled, reserved):>8}"
            f"{fitting:>8} of {len(prompts)}"
        )
    yield ""
    yield from paragraph(
        f"""The pool has {num_slots} slots ({snapshot.num_blocks} blocks), of which {len(used_blocks(snapshot))}
        blocks are used. Paged memory wastes only the empty end of each sequence's last block. The power of
        two is of the output's length, which such a system would have to foresee."""
    )


def beams(lab: Lab) -> Lines:
    yield from heading(3, "Three beams that share a prefix")
    num_tokens, prompt = 36, excerpt(0, 18)
    search = SamplingParams(n=3, use_beam_search=True, max_tokens=num_tokens, ignore_eos=True)
    lab.add("F", prompt, search)
    lab.finish("F")  # a search that is this long answers with the beams that a longer one has here
    texts = [token_ids for _, token_ids in sorted(lab.token_ids.items())]
    lab.clear()
    num_prompt_tokens = lab.add("F", prompt, search.with_changes(max_tokens=2 * num_tokens))
    lab.step(num_tokens)

    snapshot = lab.core.kv_snapshot()
    sequences, labels = sequences_of(snapshot, "F"), labels_of(snapshot)
    yield from paragraph(
        f"""A beam search of width 3, {num_tokens} tokens after the {num_prompt_tokens} of {quoted(prompt)}. At each
        step the best three continuations go on; beams fork, and those that lost give their blocks back (~)."""
    )
    yield ""
    for sequence, token_ids in zip(sequences, texts, strict=True):
        text = lab.text(token_ids[num_prompt_tokens:])
        yield from entry(f"beam {labels[sequence.seq_id]}:", text)
    yield ""
    yield "Their block tables; (x3) means that three tables point at the block:"
    yield ""
    yield from sharing_table(snapshot, sequences)
    yield ""
    yield from pool_grid(snapshot)
    yield ""
    yield beam_savings(snapshot, sequences)


def beam_savings(snapshot: KVSnapshot, sequences: Sequence[KVSequence]) -> str:
    shared = len(used_blocks(snapshot))
    apart = sum(len(s.block_table) for s in sequences)
    saved = 100 * (apart - shared) / apart
    return f"{shared} blocks are used; without sharing it would be {apart}: {saved:.0f}% saved."


def copy_on_write(lab: Lab) -> Lines:
    yield from heading(4, "A copy-on-write as it happens")
    sampling = SamplingParams(n=2, temperature=1.0, max_tokens=12, ignore_eos=True)
    prompt = excerpt(145, 20)
    num_prompt_tokens = lab.add("G", prompt, sampling)
    lab.step()  # computes the prompt, draws two first tokens from its last position, forks
    before, num_copies = lab.core.kv_snapshot(), lab.core.stats().num_block_copies
    yield from paragraph(
        f"""Two answers (n=2) to {quoted(prompt)}, {num_prompt_tokens} tokens. They have been computed once, and both
        tables point at their blocks, the half-full last one too:"""
    )
    yield ""
    yield from family_picture(before)
    lab.step()
    after = lab.core.kv_snapshot()
    num_copies = lab.core.stats().num_block_copies - num_copies
    yield ""
    yield from paragraph(
        f"""Each has drawn its first token and now writes it to position {num_prompt_tokens}, in the shared
        block. Whoever writes first gets a copy; the other is then alone with the old block and writes in
        place. The step made {num_copies} copy:"""
    )
    yield ""
    for sequence in after.sequences:
        yield drawn_token(lab, before, after, sequence)
    yield ""
    yield from family_picture(after)


def drawn_token(lab: Lab, before: KVSnapshot, after: KVSnapshot, sequence: KVSequence) -> str:
    """What a sequence wrote in the step, and where."""
    child = after.sequences.index(sequence)
    token = lab.text([lab.token_ids[sequence.request_id, child][sequence.num_tokens - 1]])
    mine = [c for c in copied_blocks(before, after) if c.seq_id == sequence.seq_id]
    place = f"in place, in block {sequence.block_table[-1]}"
    if mine:
        place = f"after the copy: block {mine[0].source} -> block {mine[0].target}"
    return f"  {labels_of(after)[sequence.seq_id]} writes {token:<14} {place}"


def family_picture(snapshot: KVSnapshot) -> Lines:
    """All block tables, and every block that they point at."""
    labels = labels_of(snapshot)
    for s in snapshot.sequences:
        yield f"  {labels[s.seq_id]}: {s.num_tokens} tokens, block table {[*s.block_table]}"
    for block in used_blocks(snapshot):
        owners = " and ".join(labels[seq_id] for seq_id in block.seq_ids)
        filled = f"{block.num_filled:>2} of {snapshot.block_size} slots filled"
        yield f"     block {block.id:>2}: ref_count {block.ref_count}, {filled}, seen by {owners}"


def reuse(lab: Lab) -> Lines:
    yield from heading(5, "Blocks reused after a finish")
    prompt = excerpt(0, 110)
    num_prompt_tokens = lab.add("A", prompt, greedy(8))
    lab.step(4)
    (sequence,) = lab.core.kv_snapshot().sequences
    old_table = sequence.block_table
    lab.finish("A")
    yield from paragraph(
        f"""A has run, a prompt of {num_prompt_tokens} tokens and 8 more, and has ended. Nobody refers to its blocks
        {[*old_table]} any more. They are free; but what is in them can still be found by its content:"""
    )
    yield ""
    yield from pool_grid(lab.core.kv_snapshot())
    yield ""
    yield from hit(lab, "B", excerpt(0, 80) + " And then", old_table)
    yield ""
    yield from eviction(lab, excerpt(130, 320), excerpt(60, 320))
    yield ""
    yield from hit(lab, "E", prompt, old_table)


def hit(lab: Lab, name: str, prompt: str, old_table: Sequence[int]) -> Lines:
    """A request that begins like A, and which of A's blocks it found."""
    num_prompt_tokens = lab.add(name, prompt, greedy(4))
    lab.step(2)
    (sequence,) = sequences_of(lab.core.kv_snapshot(), name)
    found = [b for b in sequence.block_table if b in old_table]
    num_inside = lab.num_cached_tokens[name] - len(found) * lab.info.block_size
    lab.finish(name)
    yield from paragraph(
        f"""{name} begins with A's text: {lab.num_cached_tokens[name]} of {num_prompt_tokens} prompt tokens are hits
        and not computed. Its table begins with A's blocks {found}."""
    )
    if num_inside > 0:
        yield f"The other {num_inside} lie in a block that agrees with {name}'s only so far; they are copied."


def eviction(lab: Lab, *prompts: str) -> Lines:
    """Requests with other texts, which need more blocks than are free and empty."""
    before, num_evictions = lab.core.kv_snapshot(), lab.core.stats().num_evictions
    names = "CD"[: len(prompts)]
    for name, prompt in zip(names, prompts, strict=True):
        lab.add(name, prompt, greedy(8))
    lab.step(4)  # more tokens than one step's budget
    after = lab.core.kv_snapshot()
    num_evictions = lab.core.stats().num_evictions - num_evictions
    taken = [b.id for b in used_blocks(after) if before.blocks[b.id].is_cached]
    yield from paragraph(
        f"""{" and ".join(names)} bring other texts and take {len(used_blocks(after))} blocks, more than there are
        empty ones. So {num_evictions} cached blocks are evicted: {taken}. The least recently used go first, of one
        sequence the deepest, so that what is left is still the beginning of something."""
    )
    yield ""
    yield from pool_grid(after)
    lab.finish(*names)


SECTIONS: tuple[Callable[[Lab], Lines], ...] = (
    one_sequence,
    different_lengths,
    beams,
    copy_on_write,
    reuse,
)


def main() -> None:
    lab = Lab(EngineConfig.from_options(OPTIONS))
    info = lab.info
    sys.stdout.write(
        f"{info.num_parameters / 1e6:.0f}M parameters, {info.num_blocks} KV blocks of {info.block_size} tokens, "
        f"{info.kv_cache_bytes / info.num_blocks / 1024:.0f} KiB each\n"
    )
    for section in SECTIONS:
        sys.stdout.writelines(f"{line}\n" for line in section(lab))
        sys.stdout.flush()
        lab.clear()


if __name__ == "__main__":
    main()
