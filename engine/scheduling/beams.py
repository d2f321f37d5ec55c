"""The beams of a request as running sequences: they fork and end at every step.

What follows what is decided by :class:`~octavo.engine.scheduling.beam_search.BeamSearch`.
"""

from __future__ import annotations

from ..step import RowResult
from .beam_search import Continuation
from .request import Request, Sequence, SequenceUpdate
from .request_table import RequestTable
from .updates import failed, hypothesis


def take_candidates(
    table: RequestTable, sequence: Sequence, row: RowResult
) -> list[SequenceUpdate]:
    """Note what may follow a beam; go on when it is known of all beams."""
    request = sequence.request
    search = request.beam_search
    if search is None or row.error is not None:
        for beam in request.sequences:  # others may have failed in the same step
            table.memory.forget(beam.live_blocks)
        return _end_beams(table, request, row.error or "")
    search.candidates[sequence.seq_id] = row.candidates or ()
    if row.logprobs is not None:
        search.reported[sequence.seq_id] = row.logprobs
    if len(search.candidates) < len(request.sequences):
        return []
    beams = [(s.output_token_ids, search.candidates[s.seq_id]) for s in request.sequences]
    reported = [search.reported[s.seq_id] for s in request.sequences] if search.reported else ()
    search.forget_candidates()
    continuations = search.advance(beams, reported)
    if search.is_done:
        return _end_beams(table, request, "the beam search found too few answers")
    _replace_beams(table, request, continuations)
    return []


def _replace_beams(
    table: RequestTable, request: Request, continuations: list[Continuation]
) -> None:
    """A beam goes on as its best continuation, forks for the others, ends without any."""
    parents, beams = request.sequences, []
    num_tokens = len(parents[0].token_ids)
    continued: set[int] = set()
    for parent_index, token_id, *_ in continuations:
        beam = parent = parents[parent_index]
        token_ids = [*parent.token_ids[:num_tokens], token_id]
        if parent_index in continued:
            beam = table.new_sequence(request, 0, token_ids, parent.chain)
            table.fork(parent, beam, num_tokens)
        else:
            continued.add(parent_index)
            beam.token_ids.append(token_id)
            beam.unsent_token_ids.append(token_id)
        beams.append(beam)
    for index, parent in enumerate(parents):
        if index not in continued:
            table.end(parent, is_kept=False)
    table.replace_running(parents, beams)
    request.sequences = beams


def _end_beams(table: RequestTable, request: Request, error: str) -> list[SequenceUpdate]:
    """The answers of a search, and an error for each that is missing."""
    search = request.beam_search
    found = [] if search is None or not search.is_done else search.hypotheses
    updates = [hypothesis(request, index, one) for index, one in enumerate(found)]
    for sequence in request.sequences:
        table.end(sequence, is_kept=not error)
    missing = range(len(found), request.new.sampling.n)
    updates += [failed(request, index, error) for index in missing]
    table.forget(request)
    return updates
