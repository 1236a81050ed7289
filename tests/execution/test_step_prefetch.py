"""`run(fetches, feeds, steps=…)`: the same numbers, states and errors as of so many calls."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, CheckError, FeedError
from graphflow.execution import step_prefetch as streaming
from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.checkpoint import load


class Model:
    """State on one worker, half of the work on the other; a negative feed makes a step fail."""

    def __init__(self, first: str = "/worker:0", second: str = "/worker:1") -> None:
        self.x = gf.placeholder("float32", (None, 3), name="x")
        with gf.device(first):
            self.state = gf.variable(np.ones(3, "float32"), name="state")
            mixed = self.x * self.state
        with gf.device(second):
            noise = gf.random.normal((3,))
            checked = gf.debug.check(mixed, gf.all(self.x >= 0), "no negative feeds")
            summed = gf.sum(checked, axis=0) + noise
        with gf.device(first):
            self.update = gf.assign(self.state, 0.5 * self.state + 0.1 * summed)
            count = gf.variable(0.0, name="count")
            counted = gf.assign(count, count + 1.0)
        with gf.device(second):
            self.other = counted * 1.0

    def feeds(self, count: int, failing: int = -1, rows: int = 2) -> list[dict[Any, Any]]:
        values = [np.full((rows, 3), step + 1.0, "float32") for step in range(count)]
        if 0 <= failing < count:
            values[failing] = -values[failing]
        return [{self.x: value} for value in values]


@pytest.fixture(autouse=True)
def begun_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick these small steps are, they are begun ahead, but where a test is of others."""
    if "quick" not in request.fixturenames:
        monkeypatch.setattr(streaming, "QUICK_STEP_SECONDS", 0.0)


@pytest.fixture
def quick(session: gf.Session, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way the steps of a stream go: none that is quick is begun ahead, however long a busy
    machine takes for it."""
    ways: list[str] = []
    steps = session._steps

    def spy_on(name: str) -> None:
        whole = getattr(steps, name)

        def record_call(*given: Any) -> Any:
            result = whole(*given)
            ways.append(name if result is not None else f"not {name}")
            return result

        monkeypatch.setattr(steps, name, record_call)

    for name in ("begin", "run", "run_cached"):
        spy_on(name)
    monkeypatch.setattr(streaming, "QUICK_STEP_SECONDS", 1e9)
    return ways


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module", params=["plain", "checkpoints"])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[gf.Session]:
    kept: dict[str, Any] = {}
    if request.param == "checkpoints":
        kept = {"checkpoint": tmp_path_factory.mktemp("stream"), "every": 3}
    cluster = Cluster.local(workers=2, threads=1)
    with gf.Session(cluster, deadline=60, trial=False, **kept) as session:
        yield session


def restart(session: gf.Session, model: Model) -> None:
    session.set(model.state, np.ones(3, "float32"))


def run_in_loop(session: gf.Session, model: Model, feeds: list[Any]) -> list[bytes]:
    restart(session, model)
    before = session._steps.committed
    values = [session.run(model.update, each).tobytes() for each in feeds]
    values.append(session.get(model.state).tobytes())
    session._steps.committed = before  # the same random numbers again
    return values


def test_steps_together_have_the_bits_of_steps_one_by_one(
    session: gf.Session, model: Model
) -> None:
    feeds = model.feeds(12)
    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    values = [each.tobytes() for each in session.run(model.update, iter(feeds), steps=12)]
    assert [*values, session.get(model.state).tobytes()] == expected


def test_what_a_step_takes_that_was_begun_ahead_is_not_the_time_that_it_was_waited_for(
    session: gf.Session, model: Model
) -> None:
    run_in_loop(session, model, model.feeds(4))
    took = session._compiled[(id(model.update),)].recent_seconds
    before = [*took]
    assert len(before) >= 3
    for _ in session.run(model.update, model.feeds(8), steps=8):
        time.sleep(0.002)  # the next one is computed meanwhile
    assert len(took) <= len(before) + 3, "of those that could not be begun ahead"
    added = list(took)[len(before) :]
    assert all(seconds > 0.2 * min(before) for seconds in added)


def test_quick_steps_have_the_bits_of_steps_one_by_one_and_none_is_begun_ahead(
    session: gf.Session, model: Model, quick: list[str]
) -> None:
    feeds = model.feeds(12)
    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    quick.clear()
    values = [each.tobytes() for each in session.run(model.update, iter(feeds), steps=12)]
    assert [*values, session.get(model.state).tobytes()] == expected
    short = "run_cached" if session._runs_cached else "run"
    assert quick == [short] * 12


def test_a_quick_step_with_other_feeds_goes_the_long_way_and_those_after_it_the_short_one(
    session: gf.Session, model: Model, quick: list[str]
) -> None:
    feeds = [model.feeds(1, rows=2 + (step == 4))[0] for step in range(9)]
    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    quick.clear()
    values = [each.tobytes() for each in session.run(model.update, feeds, steps=9)]
    assert [*values, session.get(model.state).tobytes()] == expected
    assert "begin" not in quick and len([way for way in quick if "not" not in way]) == 9


def test_quick_steps_tell_what_is_wrong_with_their_feeds_after_those_before_them(
    session: gf.Session, model: Model, quick: list[str]
) -> None:
    def yield_then_fail() -> Iterator[Any]:
        yield from good
        raise RuntimeError("no more")

    good = model.feeds(4)
    wrong = [
        ([*good, {model.x: np.ones((2, 4))}], FeedError, r"feeds 5 of 6: .*\(2, 4\)"),
        ([*good, {}], FeedError, "feeds 5 of 6: placeholder 'x'"),
        ([*good, {model.x: "text"}], FeedError, "feeds 5 of 6"),
        (good, FeedError, "feeds 5 of 6: the feeds ended after 4"),
        (yield_then_fail(), RuntimeError, "no more"),
        ([*good, *model.feeds(1, failing=0)], CheckError, "no negative feeds"),
    ]
    for feeds, error, text in wrong:
        expected = run_in_loop(session, model, good)
        restart(session, model)
        values = []
        with pytest.raises(error, match=text):
            for each in session.run(model.update, feeds, steps=6):
                values.append(each.tobytes())
        assert [*values, session.get(model.state).tobytes()] == expected
    assert "begin" not in quick


def test_a_stream_of_quick_steps_may_be_left_and_gone_on_with(
    session: gf.Session, model: Model, quick: list[str]
) -> None:
    feeds = model.feeds(8)
    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    values = []
    for each in session.run(model.update, feeds, steps=8):
        values.append(each.tobytes())
        session.run(model.other)
        if len(values) == 5:
            break
    session._steps.committed -= len(values)  # the same random numbers as without the others
    values += [each.tobytes() for each in session.run(model.update, feeds[5:], steps=3)]
    assert len(values) == 8 and "begin" not in quick
    assert [len(each) for each in values] == [len(each) for each in expected[:8]]


def test_steps_of_one_process_are_the_same() -> None:
    model = Model("/worker:0", "/worker:0")
    feeds = model.feeds(5)
    with gf.Session() as one, gf.Session() as other:
        expected = [one.run(model.update, each).tobytes() for each in feeds]
        values = [each.tobytes() for each in other.run(model.update, feeds, steps=5)]
        assert values == expected
        assert one.get(model.state).tobytes() == other.get(model.state).tobytes()


def test_results_have_the_structure_of_the_fetches(session: gf.Session, model: Model) -> None:
    restart(session, model)
    results = list(session.run({"u": model.update, "x": [model.x]}, model.feeds(4), steps=4))
    assert [sorted(each) for each in results] == [["u", "x"]] * 4
    assert [float(each["x"][0][0, 0]) for each in results] == [1, 2, 3, 4]


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(failing=st.integers(0, 7), count=st.integers(1, 8))
def test_an_error_leaves_the_steps_before_it_and_nothing_else(
    session: gf.Session, model: Model, failing: int, count: int
) -> None:
    feeds = model.feeds(count, failing)
    good = feeds[: min(failing, count)]
    expected = run_in_loop(session, model, good)
    restart(session, model)
    before = session._steps.committed
    values = []
    try:
        for each in session.run(model.update, iter(feeds), steps=count):
            values.append(each.tobytes())
        assert failing >= count
    except CheckError as error:
        assert failing < count and "no negative feeds" in str(error)
    assert [*values, session.get(model.state).tobytes()] == expected
    assert session._steps.committed - before == len(good)
    restart(session, model)
    assert np.isfinite(session.run(model.update, model.feeds(1)[0])).all()


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seen=st.integers(0, 5))
def test_who_stops_early_finds_the_state_after_the_last_result_that_was_seen(
    session: gf.Session, model: Model, seen: int
) -> None:
    feeds = model.feeds(9)
    expected = run_in_loop(session, model, feeds[:seen])
    restart(session, model)
    before = session._steps.committed
    results = session.run(model.update, iter(feeds), steps=9)
    values = [each.tobytes() for each in itertools.islice(results, seen)]
    assert [*values, session.get(model.state).tobytes()] == expected
    results.close()
    assert session.get(model.state).tobytes() == expected[-1]
    assert session._steps.committed - before == seen


def test_other_steps_in_between_come_in_their_place(session: gf.Session, model: Model) -> None:
    feeds = model.feeds(6)
    expected = run_in_loop(session, model, [feeds[0], feeds[1], feeds[5], *feeds[2:5]])
    restart(session, model)
    results = session.run(model.update, iter(feeds[:5]), steps=5)
    values = [next(results).tobytes(), next(results).tobytes()]
    values.append(session.run(model.update, feeds[5]).tobytes())
    values += [each.tobytes() for each in results]
    assert [*values, session.get(model.state).tobytes()] == expected


def test_a_variable_that_is_set_in_between_counts_for_the_next_step(
    session: gf.Session, model: Model
) -> None:
    restart(session, model)
    results = session.run(model.update, iter(model.feeds(6)), steps=6)
    next(results)
    next(results)
    session.set(model.state, np.zeros(3, "float32"))
    after = next(results)
    assert (np.abs(after) < 5).all()  # 3 rows of feeds times zero, and noise
    results.close()


def test_sizes_may_change_on_the_way(session: gf.Session, model: Model) -> None:
    feeds = [*model.feeds(3, rows=2), *model.feeds(3, rows=5), *model.feeds(2, rows=2)]
    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    values = [each.tobytes() for each in session.run(model.update, feeds, steps=8)]
    assert [*values, session.get(model.state).tobytes()] == expected


def test_arrays_of_feeds_may_be_used_again_at_once(session: gf.Session, model: Model) -> None:
    expected = run_in_loop(session, model, model.feeds(8))
    restart(session, model)
    buffer = np.empty((2, 3), "float32")

    def batches() -> Iterator[Any]:
        for step in range(8):
            buffer[:] = step + 1.0
            yield {model.x: buffer}

    values = [each.tobytes() for each in session.run(model.update, batches(), steps=8)]
    assert values == expected[:-1]


@pytest.mark.parametrize("seen", [2, 4])
def test_a_generator_of_feeds_is_let_go_at_the_end_and_by_who_stops_early(
    session: gf.Session, model: Model, seen: int
) -> None:
    ended = []

    def feeds() -> Iterator[Any]:
        try:
            yield from itertools.repeat(model.feeds(1)[0])
        finally:
            ended.append(True)

    results = iter(session.run(model.update, feeds(), steps=4))
    for _ in range(seen):
        next(results)
    assert not ended
    if seen == 4:
        assert list(results) == []
    del results
    gc.collect()
    assert ended == [True]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_garbage_collector_may_end_it_in_the_middle_of_what_undoes_it(
    session: gf.Session, model: Model, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, undone = session._steps, []
    undo = steps.undo
    results = session.run(model.update, itertools.repeat(model.feeds(1)[0]), steps=9)
    next(results), next(results)
    assert count_begun_steps(session)
    held, before = [results], session.step
    del results

    def collect_then_undo(begun: Any) -> None:
        undone.append(len(begun))
        if elsewhere:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        else:
            held.clear()
        undo(begun)

    monkeypatch.setattr(steps, "undo", collect_then_undo)
    session.run(model.other)
    assert session.step == before + 1 and len(undone) == 1


def test_no_more_feeds_are_taken_than_there_are_steps(session: gf.Session, model: Model) -> None:
    taken = []

    def batches() -> Iterator[Any]:
        for step in itertools.count():
            taken.append(step)
            yield model.feeds(1)[0]

    assert len(list(session.run(model.update, batches(), steps=5))) == 5
    assert len(taken) == 5


@pytest.mark.parametrize(
    ("rows", "changing", "ahead"), [(2, False, 15), (6000, False, 2), (2, True, 2)]
)
def test_how_far_feeds_are_taken_ahead(
    session: gf.Session, model: Model, rows: int, changing: bool, ahead: int
) -> None:
    """Sixteen small steps that change nothing may be under way, three others."""
    with gf.device("/worker:1"):
        fetch = model.update if changing else gf.sum(model.x, axis=0)
    feeds = model.feeds(40, rows=rows)
    expected = [] if changing else [session.run(fetch, each).tobytes() for each in feeds]
    taken, most = [], 0

    def batches() -> Iterator[Any]:
        for each in feeds:
            taken.append(each)
            yield each

    values = []
    for value in session.run(fetch, batches(), steps=40):
        values.append(value.tobytes())
        most = max(most, len(taken) - len(values))
    assert most == ahead
    assert changing or values == expected


def test_large_steps_among_small_ones_keep_all_from_being_far_ahead(
    session: gf.Session, model: Model
) -> None:
    with gf.device("/worker:1"):
        fetch = gf.sum(model.x, axis=0)
    small, large = model.feeds(1)[0], model.feeds(1, rows=6000)[0]
    feeds = [large if step % 10 == 9 else small for step in range(60)]
    for each in (large, small):
        session.run(fetch, each)
    taken: list[Any] = []
    most = 0
    results = session.run(fetch, (taken.append(each) or each for each in feeds), steps=60)
    for seen, _ in enumerate(results, 1):
        most = max(most, sum(each is large for each in taken[seen:]))
    assert most == 1


def test_an_error_in_many_small_steps_comes_in_its_turn_and_others_follow(
    session: gf.Session, model: Model
) -> None:
    with gf.device("/worker:0"):
        fetch = gf.debug.check(gf.sum(model.x), gf.all(model.x >= 0), "no negative feeds")
    feeds = model.feeds(30, failing=13)
    session.run(fetch, feeds[0])
    values = []
    with pytest.raises(CheckError, match="no negative feeds"):
        for value in session.run(fetch, feeds, steps=30):
            values.append(float(value))
    assert values == [6.0 * (step + 1) for step in range(13)]
    rest = session.run(fetch, feeds[14:], steps=16)
    assert [float(value) for value in rest] == [6.0 * (step + 1) for step in range(14, 30)]


# Mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3", True, []])
def test_steps_that_are_no_positive_integer_are_refused(
    session: gf.Session, model: Model, steps: Any
) -> None:
    with pytest.raises(ArgumentError, match="steps"):
        session.run(model.update, model.feeds(1), steps=steps)


@pytest.mark.parametrize("feeds", [None, {}, 3, "feeds"])
def test_feeds_that_are_no_iterable_of_feeds_are_refused(
    session: gf.Session, model: Model, feeds: Any
) -> None:
    with pytest.raises(FeedError, match="iterable"):
        session.run(model.update, feeds, steps=3)


def test_an_iterator_that_ends_early_names_the_step(session: gf.Session, model: Model) -> None:
    results = session.run(model.update, iter(model.feeds(3)), steps=5)
    assert len([next(results) for _ in range(3)]) == 3
    with pytest.raises(FeedError, match=r"feeds 4 of 5.*ended after 3"):
        next(results)


def test_wrong_feeds_name_the_step_when_it_is_their_turn(session: gf.Session, model: Model) -> None:
    feeds: list[Any] = model.feeds(5)
    feeds[3] = {model.x: np.zeros((2, 4), "float32")}
    results = session.run(model.update, feeds, steps=5)
    for _ in range(3):
        next(results)
    with pytest.raises(FeedError):
        next(results)
    feeds[3] = {"x": 1}
    with pytest.raises(FeedError, match="feeds 4 of 5"):
        list(session.run(model.update, feeds, steps=5))


def test_an_iterator_that_raises_does_so_after_the_steps_before(
    session: gf.Session, model: Model
) -> None:
    class Gone(Exception):
        pass

    def batches() -> Iterator[Any]:
        yield from model.feeds(4)
        raise Gone

    feeds = model.feeds(4)
    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    values = []
    with pytest.raises(Gone):
        for each in session.run(model.update, batches(), steps=9):
            values.append(each.tobytes())
    assert [*values, session.get(model.state).tobytes()] == expected


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_in_an_iterator_is_not_kept_back_and_the_state_is_that_of_what_was_seen(
    session: gf.Session, model: Model, end: type[BaseException]
) -> None:
    feeds = model.feeds(8)

    def batches() -> Iterator[Any]:
        yield from feeds[:4]
        raise end

    expected = run_in_loop(session, model, feeds)
    restart(session, model)
    before, values = session.step, []
    with pytest.raises(end):
        for each in session.run(model.update, batches(), steps=9):
            values.append(each.tobytes())
    assert 2 <= len(values) <= 4 and count_begun_steps(session) == 0
    assert session.step == before + len(values)
    rest = session.run(model.update, iter(feeds[len(values) :]), steps=8 - len(values))
    assert [*values, *(each.tobytes() for each in rest)] == expected[:-1]
    assert session.get(model.state).tobytes() == expected[-1]


@pytest.mark.parametrize("where", ["begun", "decided"])
def test_ctrl_c_while_a_step_is_begun_or_about_to_be_decided_leaves_none_with_the_workers(
    session: gf.Session, model: Model, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had would be committed together with the next step of anything."""
    session.run(model.other)
    feeds = model.feeds(2)
    expected = run_in_loop(session, model, feeds[:1])
    restart(session, model)
    steps = session._steps
    begin = steps.begin

    def begin_then_interrupt(*args: Any) -> Any:
        begin(*args)
        raise KeyboardInterrupt

    def raise_interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    stream = session.run(model.update, feeds, steps=2)
    values = [next(stream).tobytes()]
    name, interrupted = (
        ("begin", begin_then_interrupt) if where == "begun" else ("finish", raise_interrupt)
    )
    monkeypatch.setattr(steps, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.undo()
    session.run(model.other)
    session.run(model.other)
    assert [*values, session.get(model.state).tobytes()] == expected


def test_feeds_that_a_step_lacks_name_the_step(session: gf.Session, model: Model) -> None:
    feeds: list[Any] = model.feeds(4)
    feeds[2] = {}
    with pytest.raises(FeedError, match="feeds 3 of 4: placeholder 'x'"):
        list(session.run(model.update, feeds, steps=4))


def test_many_feeds_without_steps_are_told_of_steps(session: gf.Session, model: Model) -> None:
    with pytest.raises(FeedError, match=r"steps=n") as caught:
        session.run(model.update, model.feeds(900))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 400


# Checkpoints -----------------------------------------------------------------------------------


def count_begun_steps(session: gf.Session) -> int:
    """How many steps a stream of the session has begun ahead."""
    window = session._life.stream._window if session._life.stream is not None else ()
    return sum(step.begun is not None for step in window)


def test_steps_begin_ahead_of_checkpoints_and_each_of_these_has_the_state_of_its_step(
    model: Model, tmp_path: Path
) -> None:
    feeds, most, states = model.feeds(13), 0, {}
    cluster = Cluster.local(workers=2, threads=1)
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=2, keep=20) as session:
        for value in session.run(model.update, iter(feeds), steps=len(feeds)):
            states[session.step] = value.tobytes()
            most = max(most, count_begun_steps(session))
            assert session._recovery is not None
            session._recovery.wait()  # else one that is due meanwhile is left out
    assert most == 2
    for step in (2, 4, 6, 8, 10, 12, 13):
        checkpoint = load(tmp_path / "c" / f"step-{step:08d}")
        assert checkpoint.variables["state"].tobytes() == states[step]


def test_ctrl_c_while_what_was_begun_ahead_is_undone_is_not_lost(
    session: gf.Session, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python passes over what the end of a generator raises."""
    life = session._life
    undo = life.undo

    def undo_then_interrupt(stream: Any) -> None:
        undo(stream)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life, "undo", undo_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            for _ in session.run(model.update, model.feeds(5), steps=5):
                break
            began = time.monotonic()
            time.sleep(10.0)
    assert time.monotonic() - began < 5.0  # it wakes who sleeps
    before = session.step
    session.run(model.update, model.feeds(1)[0])
    assert session.step == before + 1


def test_who_goes_on_after_a_stream_that_stopped_early_has_the_same_bits(
    model: Model, tmp_path: Path
) -> None:
    feeds = model.feeds(9)

    def run(first: int, **options: Any) -> list[bytes]:
        values: list[bytes] = []
        while len(values) < len(feeds):
            cluster = Cluster.local(workers=2, threads=1)
            with gf.Session(cluster, trial=False, **options) as session:
                at = session.step
                found = session.run(model.update, iter(feeds[at:]), steps=len(feeds) - at)
                values += [each.tobytes() for each in itertools.islice(found, first)]
        return values

    assert run(5, checkpoint=tmp_path / "c", every=4) == run(9)
