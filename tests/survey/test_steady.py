"""Which races count: a disturbance is noticed by the times alone, and a race is run again, within bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch

from nybble.models.decode import Speed
from nybble.survey import Row, steady
from nybble.survey.rows import ORIGINAL
from nybble.survey.steady import REPEATS, Referee, reviewed

QUIET = ((24.0, 24.0, 24.0), (16.0, 16.0, 16.0))
"""Milliseconds a token in each turn: the original's, the candidate's."""

Turns = tuple[tuple[float, ...], tuple[float, ...]]
Play = Callable[..., tuple[dict[str, Speed], bool, int]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a referee's races of 5 s, in which the models take the times of a script and a thread waits as given."""
    now, lost = [0.0], {"1": 100.0}
    monkeypatch.setattr(steady, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(steady, "waited", lost.copy)

    def played(
        referee: Referee, script: Sequence[Turns], waits: Sequence[dict[str, float]] = ()
    ) -> tuple[dict[str, Speed], bool, int]:
        races, told = iter(script), []
        threads = chain(waits, repeat({}))

        def race(models: object, prompt: object) -> dict[str, Speed]:
            now[0] += 5.0
            for thread, seconds in next(threads).items():
                lost[thread] = lost.get(thread, 0.0) + seconds
            return {
                name: Speed(statistics.median(turns), 32 * len(turns), 0.0, turns)
                for name, turns in zip((ORIGINAL, "W8A16"), next(races), strict=True)
            }

        monkeypatch.setattr(steady, "race", race)
        speeds, busy = referee.race({}, torch.arange(3), lambda: told.append("again"))
        return speeds, busy, 1 + len(told)

    return played


CASES: list[tuple[str, Turns, bool]] = [
    ("quiet", QUIET, False),
    ("a candidate disturbed in most turns", ((24, 24, 25), (17, 90, 88)), True),
    ("an original disturbed in most turns", ((24, 60, 61), (16, 16, 16)), True),
    ("one slow turn of three does not move the median", ((24, 24, 90), (60, 16, 16)), False),
    ("a slow candidate disturbed in one of its two turns", ((24, 24, 24), (150, 1330)), True),
    ("both disturbed from beginning to end", ((1920, 1924), (1928, 1928)), True),
    ("both a little slower, as processors are", ((35, 35, 35), (23, 23, 23)), False),
    ("slow, and quiet", ((24, 24, 24), (190, 192, 210)), False),
]


@pytest.mark.parametrize(("turns", "disturbed"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_counts_as_disturbed(play: Play, turns: Turns, disturbed: bool) -> None:
    speeds, busy, races = play(Referee(fastest=24.0), [turns, QUIET])
    assert races == 1 + disturbed
    assert not busy
    assert speeds["W8A16"].turns == (QUIET if disturbed else turns)[1]


@pytest.mark.parametrize(
    ("waits", "disturbed"),
    [({"1": 0.9}, False), ({"1": 1.1}, True), ({"1": 0.9, "2": 0.9}, False), ({"2": 1.1}, True)],
    ids=["a little", "too long", "two a little", "one that began in the race"],
)
def test_threads_that_waited_for_a_processor(play: Play, waits: dict[str, float], disturbed: bool) -> None:
    """However well the times agree; what was waited before the race does not count."""
    assert play(Referee(fastest=24.0), [QUIET] * 2, [waits])[1:] == (False, 1 + disturbed)
    assert play(Referee(), [QUIET] * (REPEATS + 1), [waits] * (REPEATS + 1))[1] == disturbed


def test_without_an_earlier_race_the_turns_alone_tell(play: Play) -> None:
    slow = ((1920.0, 1924.0), (1928.0, 1928.0))
    referee = Referee()
    assert play(referee, [slow])[1:] == (False, 1)
    assert play(referee, [QUIET])[1:] == (False, 1)
    assert referee.fastest == 24.0
    assert play(referee, [slow, slow, QUIET])[1:] == (False, 3), "what a quiet race showed is remembered"


def test_repeats_have_an_end(play: Play) -> None:
    restless = ((24.0, 60.0), (17.0, 90.0))
    referee = Referee(fastest=24.0, patience=math.inf)
    assert play(referee, [restless] * (REPEATS + 1))[1:] == (True, REPEATS + 1)


def test_a_survey_has_only_so_much_patience(play: Play) -> None:
    restless = ((24.0, 60.0), (17.0, 90.0))
    referee = Referee(fastest=24.0, patience=12.0)
    assert play(referee, [restless] * 4)[1:] == (True, 4), "three of 5 s that were run again"
    assert play(referee, [restless])[1:] == (True, 1)
    assert play(referee, [QUIET])[1:] == (False, 1)


def test_a_quiet_race_takes_no_patience(play: Play) -> None:
    referee = Referee()
    play(referee, [QUIET])
    assert referee.patience == steady.PATIENCE


def test_models_without_an_original_race_by_their_turns(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original's dtypes race against each other before anything is known."""
    monkeypatch.setattr(steady, "ORIGINAL", "not in this race")
    referee = Referee()
    assert play(referee, [((24.0, 60.0), (40.0, 40.0)), QUIET])[1:] == (False, 2)
    assert referee.fastest == math.inf


def test_rows_beside_a_slow_original_are_seen_when_a_later_one_is_fast() -> None:
    beside = {"LONG_AGO": 20.0, "CLOCKED_DOWN": 34.0, "NOW": 50.0}
    rows = [Row(name, "rtn", tokens_per_second=2 * speed, speedup=2.0) for name, speed in beside.items()]
    refused, marked = Row("NO", "rtn"), Row("MARKED", "rtn", tokens_per_second=50.0, speedup=1.0, busy=True)
    found = {row.scheme: row.busy for row in reviewed([*rows, refused, marked])}
    assert found == {"LONG_AGO": True, "CLOCKED_DOWN": False, "NOW": False, "NO": False, "MARKED": True}
    assert reviewed([refused]) == [refused]
