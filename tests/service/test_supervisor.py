from __future__ import annotations

import pytest

from octavo.engine.service.supervisor import MAX_DELAY_S, SUSPECT_DEATHS, Supervisor


def test_deaths_with_a_token_between_never_add_up() -> None:
    supervisor = Supervisor(1)
    for _ in range(50):
        verdict = supervisor.died(["a", "b"])
        assert (verdict.is_over, verdict.convicted) == (False, None)
        supervisor.gained(["a", "b"])
        assert not supervisor.is_isolating


@pytest.mark.parametrize("max_restarts", [0, 1, 5])
def test_deaths_in_vain_are_counted(max_restarts: int) -> None:
    supervisor = Supervisor(max_restarts)
    supervisor.gained()
    verdicts = [supervisor.died(()) for _ in range(max_restarts + 1)]
    assert [verdict.is_over for verdict in verdicts] == [False] * max_restarts + [True]


def test_delays_double_up_to_a_limit_and_start_over_with_a_token() -> None:
    supervisor = Supervisor(1000)
    delays = [supervisor.died(()).delay_s for _ in range(100)]
    assert delays[:4] == [0.25, 0.5, 1.0, 2.0]
    assert delays[-1] == MAX_DELAY_S
    supervisor.gained()
    assert supervisor.died(()).delay_s == 0.25


def test_an_engine_that_was_sound_for_long_begins_a_new_series() -> None:
    supervisor = Supervisor(1)
    assert not any(supervisor.died((), was_sound=True).is_over for _ in range(10))


def test_after_a_second_death_in_vain_the_dying_step_runs_one_at_a_time() -> None:
    supervisor = Supervisor(10)
    waiting = ["a", "b", "waits"]
    supervisor.died(["a", "b"])
    assert supervisor.choose(waiting, is_anyone_running=False) == waiting
    supervisor.died(["a", "b"])
    assert supervisor.choose(waiting, is_anyone_running=False) == ("a",)
    assert supervisor.choose(["b", "waits"], is_anyone_running=True) == ()
    assert supervisor.gained(["a"]) == "a"  # which makes way
    assert supervisor.choose(waiting, is_anyone_running=False) == ("b",)
    assert supervisor.gained(["b"]) is None  # the last one stays
    assert not supervisor.is_isolating
    assert supervisor.choose(["a", "waits"], is_anyone_running=True) == ["a", "waits"]


def test_only_the_one_on_trial_is_convicted() -> None:
    supervisor = Supervisor(10)
    supervisor.died(["a", "b"])
    supervisor.died(["a", "b"])
    supervisor.choose(["a", "b"], is_anyone_running=False)
    assert supervisor.died(["a"]).convicted == "a"
    assert supervisor.choose(["b"], is_anyone_running=False) == ("b",)
    supervisor.gained(["b"])
    assert not supervisor.is_isolating
    assert not supervisor.is_watchful


def test_a_death_on_no_trial_convicts_nobody() -> None:
    supervisor = Supervisor(10)
    assert supervisor.died(["a"]).convicted is None
    supervisor.gained(["a"])
    assert supervisor.died(["a"]).convicted is None
    assert supervisor.died(()).convicted is None


def test_the_second_death_of_one_that_was_alone_each_time_convicts_it() -> None:
    supervisor = Supervisor(10)
    assert supervisor.died(["a"]).convicted is None
    assert supervisor.died(["a"]).convicted == "a"


def test_one_that_gains_nothing_while_others_do_is_found_too() -> None:
    supervisor = Supervisor(1)
    for _ in range(SUSPECT_DEATHS):
        assert not supervisor.is_isolating
        supervisor.gained(["a"])
        supervisor.died(["a", "poison"])
    assert supervisor.choose(["a", "poison"], is_anyone_running=False) == ("poison",)


@pytest.mark.parametrize("is_on_trial", [False, True])
def test_a_suspect_that_is_aborted_stops_nobody(is_on_trial: bool) -> None:
    supervisor = Supervisor(10)
    supervisor.died(["a", "b"])
    supervisor.died(["a", "b"])
    if is_on_trial:
        supervisor.choose(["a", "b"], is_anyone_running=False)
    supervisor.forget("a")
    assert supervisor.choose(["b", "new"], is_anyone_running=False) == ("b",)
    supervisor.forget("b")
    assert supervisor.choose(["new"], is_anyone_running=False) == ["new"]


def test_a_conviction_is_no_progress() -> None:
    supervisor = Supervisor(3)
    supervisor.died(["a"])
    assert supervisor.died(["a"]).convicted == "a"
    supervisor.died(["b"])
    assert supervisor.died(["b"]) == (True, 2.0, "b")
