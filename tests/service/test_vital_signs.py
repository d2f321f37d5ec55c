from __future__ import annotations

import os

from octavo.engine.service.vital_signs import SignsReader, SignsWriter, Watch, make_page


def pair() -> tuple[SignsWriter, SignsReader]:
    fd = make_page()
    reader = SignsReader(fd)
    return SignsWriter(fd), reader


def test_what_is_written_is_seen() -> None:
    writer, reader = pair()
    assert reader.look() == (0, 0, False, None)
    writer.busy()
    writer.name_requests(["a", "b\n", "é"])
    assert reader.look() == (0, 1, True, None)  # no step is executed yet
    writer.executing()
    assert reader.look() == (0, 1, True, ("a", "b\n", "é"))
    writer.busy()
    assert reader.look() == (0, 2, True, None)
    writer.executing()  # the requests are still these
    assert reader.look().dying_ids == ("a", "b\n", "é")
    writer.idle()
    assert reader.look() == (0, 2, False, None)


def test_more_requests_than_fit_are_not_named() -> None:
    writer, reader = pair()
    writer.name_requests(["a"])
    writer.name_requests(["x" * 100] * 20_000)
    writer.executing()
    assert reader.look().dying_ids is None


def test_a_page_that_was_half_written_names_nobody() -> None:
    writer, reader = pair()
    writer.name_requests(["a", "b", "c"])
    writer._num_bytes -= 1
    writer.executing()
    assert reader.look() == (0, 0, True, None)


def test_the_thread_beats() -> None:
    writer, reader = pair()
    writer.start_beating()
    while not reader.glance()[0]:
        pass


def test_the_page_outlives_its_writer() -> None:
    fd = make_page()
    reader = SignsReader(fd)
    child = os.fork()
    if not child:
        writer = SignsWriter(fd)
        writer.busy()
        writer.name_requests(["a"])
        writer.executing()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    os.close(fd)
    assert reader.look() == (0, 1, True, ("a",))


def looks(watch: Watch, *seen: tuple[int, int, bool]) -> list[str | None]:
    return [watch.look(*one) for one in seen]


def test_an_engine_without_a_beat_is_stuck_whatever_it_does() -> None:
    for is_busy in (False, True):
        watch = Watch(3.0, 1000.0, 1.0)
        verdicts = looks(watch, *[(1, 1, is_busy)] * 4)
        assert verdicts == [None, None, None, "gave no sign of life for 3 s"]


def test_a_long_step_is_stuck_only_after_the_time_for_steps() -> None:
    watch = Watch(3.0, 5.0, 1.0)
    verdicts = looks(watch, *[(beat, 7, True) for beat in range(1, 7)])
    assert verdicts == [None] * 5 + ["has been in one step for 5 s"]


def test_neither_idling_nor_many_steps_are_stuck() -> None:
    watch = Watch(3.0, 5.0, 1.0)
    assert not any(looks(watch, *[(beat, 7, False) for beat in range(1, 50)]))
    assert not any(looks(watch, *[(beat, beat, True) for beat in range(51, 99)]))


def test_one_beat_begins_the_silence_anew() -> None:
    watch = Watch(3.0, 5.0, 1.0)
    assert not any(looks(watch, *[(1 + i // 3, 0, False) for i in range(30)]))
