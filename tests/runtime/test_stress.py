"""Repeated runs of kernels and programs: what differs is found, counted and placed."""

import importlib
import pickle
import sys
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import long_but


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts")
        yield SimpleNamespace(
            repeats=importlib.import_module("benchmarks.repeats"),
            pool=importlib.import_module("benchmarks.pool"),
            check=importlib.import_module("benchmarks.kernel_checks"),
            stress=importlib.import_module("benchmarks.program_stress"),
            check_entry=importlib.import_module("check_kernels"),
            stress_entry=importlib.import_module("stress_programs"),
        )


class Faulty:
    """A program whose results are right but in some calls, where one element has another bit."""

    def __init__(self, faulty_calls, place=(3, 5), dtype=jnp.bfloat16):
        self.faulty_calls, self.place, self.calls = faulty_calls, place, 0
        self.right = jnp.arange(48, dtype=jnp.float32).reshape(6, 8).astype(dtype)

    def __call__(self):
        self.calls += 1
        wrong = self.calls - 1 in self.faulty_calls
        return [jnp.zeros(3), self.right.at[self.place].set(1000) if wrong else self.right]

    def repeated(self, scripts, repeats):
        tally = scripts.repeats.none_differ([jnp.zeros(3), self.right])
        poison = partial(jnp.full, (6, 8), jnp.nan)
        return scripts.check.repeated(self, poison, tally, scripts.repeats.add_call, repeats)


@pytest.mark.parametrize("repeats", [1, 2, 5, 6, 11])
def test_repeats_are_as_many_as_asked_for_and_equal(scripts, repeats):
    run = Faulty(())
    first, tally = run.repeated(scripts, repeats)
    assert run.calls == repeats
    assert np.array_equal(first[1], run.right)
    assert scripts.repeats.describe(tally) == ""
    assert int(tally.compared) == repeats - 1


def test_runs_that_differ_are_counted_and_placed(scripts):
    _, tally = Faulty((7, 9)).repeated(scripts, 12)
    assert scripts.repeats.describe(tally) == (
        "2 of 11 repeats differ, number 7 the first; "
        "result 1(6, 8): 1 elements, by 971, at [3] x [5]"
    )


@pytest.mark.parametrize(
    ("first", "again", "calls"),
    [
        ([0.0, jnp.nan], [0.0, jnp.nan], 0),  # Poison left twice: the reference finds that.
        ([0.0, 1.0], [-0.0, 1.0], 1),
        ([0.0, 1.0], [0.0, jnp.nan], 1),
    ],
)
def test_bits_are_compared(scripts, first, again, calls):
    repeats, pair = scripts.repeats, ([jnp.array(first)], [jnp.array(again)])
    tally = repeats.add(repeats.none_differ(pair[0]), *pair)
    assert int(tally.calls) == calls


@pytest.mark.parametrize("dtype", ["bool", "int8", "float8_e4m3fn", "float16", "int32"])
def test_any_type_is_compared(scripts, dtype):
    repeats, x = scripts.repeats, jnp.zeros((2, 2), dtype)
    tally = repeats.add(repeats.none_differ([x]), [x], [x.at[0, 1].set(jnp.ones((), dtype))])
    assert repeats.describe(tally).endswith("by 1, at [0] x [1]")


def test_tiles_show_as_ranges(scripts):
    places = np.zeros((256, 512), bool)
    places[64:128, 192:320] = places[200, 7] = True
    assert scripts.repeats.ranges_of(places) == "[64-127, 200] x [7, 192-319]"
    places[::2] = True
    assert "... (160 indices)" in scripts.repeats.ranges_of(places)


def test_a_digest_changes_with_any_bit_and_with_the_order(scripts):
    x = jnp.arange(1000, dtype=jnp.bfloat16)
    digests = {int(scripts.repeats.digest(y)) for y in (x, -x, x[::-1], x.at[999].set(7))}
    assert len(digests) == 4
    words = np.zeros(64, np.uint16)
    kinds = {int(scripts.repeats.digest(jnp.asarray(words)))}
    for bit in range(16):
        words[:] = 0
        words[40] = 1 << bit
        kinds.add(int(scripts.repeats.digest(jnp.asarray(words))))
    assert len(kinds) == 17


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_kernel_is_repeated_and_then_judged(scripts, monkeypatch, error):
    case = importlib.import_module("benchmarks.kernel_cases").Case(
        kernel="double",
        name="a",
        dtype="bfloat16",
        make=lambda key: (jnp.arange(64.0, dtype=jnp.bfloat16).reshape(8, 8),),
        run=lambda x: 2 * x + error,
        reference=lambda x: 2 * x.astype(jnp.float32),
        close=({"reduction": 1},),
    )
    monkeypatch.setattr(scripts.check, "load_cases", lambda *_: [case])
    prepared = scripts.check._prepare(("double",), "", 0, 0)
    worst, problem = scripts.check._check(11, 0, prepared)
    assert (worst <= 1, problem[:8]) == ((False, "error is") if error else (True, ""))


def item(scripts, **changes):
    options = {"program": "unsplit 24x16", "calls": 4, "full": False, "tiny": True}
    return scripts.stress.Item(**options | changes)


@pytest.mark.parametrize(
    "program", long_but(["interleaved 24x16:8+16", "unsplit 24x16", "bert-base"])
)
def test_a_program_gives_the_same_in_every_call(scripts, program):
    asked = item(scripts, program=program, calls=3)
    outcome = scripts.stress.measure(asked, scripts.stress.prepare(asked))
    assert outcome.problem == ""
    assert np.isfinite(outcome.first).all()
    assert len(outcome.inputs) > 2
    if program.startswith("unsplit"):  # Its only layer: keys, values, lengths; then the copies.
        assert outcome.inputs[-3:] == outcome.inputs[-6:-3]
    assert scripts.stress.against([outcome], pickle.loads(pickle.dumps(outcome))) == ""


def test_a_call_that_differs_and_an_input_that_moves_are_found(scripts):
    measure, weights = scripts.stress.measure, [jnp.ones(4)]
    before = np.asarray(scripts.repeats.digests(weights))
    outcome = measure(item(scripts), (weights, before, lambda: ([], Faulty((2,))), 0))
    assert outcome.problem.startswith("1 of 3 repeats differ, number 2 the first; result 1(6, 8)")

    def overwriting():
        weights[0] = jnp.zeros(4)
        return [jnp.ones(2)]

    outcome = measure(item(scripts), (weights, before, lambda: ([], overwriting), 0))
    assert outcome.problem == "1 of 1 inputs are not what they were when they were made"


def test_processes_are_compared_by_inputs_and_first_call(scripts):
    def outcome(inputs, first):
        return scripts.stress.Outcome(problem="", inputs=inputs, first=first, seconds=0.0)

    right = np.ones((8, 4), np.float32)
    earlier, against = [outcome((1, 2), right)], scripts.stress.against
    assert against([], earlier[0]) == ""
    assert against(earlier, outcome((1, 2), right * 1.01)) == ""
    assert against(earlier, outcome((1, 3), right)) == (
        "inputs [1] of 2 are not those of the first process"
    )
    wrong = right.copy()
    wrong[5:7], wrong[1, 2] = -1, np.nan
    assert against(earlier, outcome((1, 2), wrong)) == (
        "9 elements of the first call differ from the first process's by more than 0.05, at "
        "[1, 5-6] x [0-3]"
    )


@pytest.mark.parametrize(("free", "blocks"), [(100, 6), (35, 0), (10, 0)])
def test_memory_is_filled_but_for_what_a_program_needs(scripts, monkeypatch, free, blocks):
    monkeypatch.setattr(scripts.stress, "free_bytes", lambda: free)
    monkeypatch.setattr(scripts.stress, "FILLING_BYTES", 10)
    monkeypatch.setattr(scripts.stress, "SLACK_BYTES", 5)
    found = scripts.stress.fill(30)
    assert [x.nbytes for x in found] == [10] * blocks


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("check", ["--repeats", "0"], "--repeats 0: 1 or more runs are allowed"),
        ("stress", ["--calls", "1"], "--calls 1 --rounds 4 --copies 1: 2 or more calls"),
        (
            "stress",
            ["--tiny", "--programs", "vit"],
            "--programs vit: not a program; programs are",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(scripts, monkeypatch, capsys, script, arguments, message):
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(scripts.stress.pool, "require_gpu", lambda: None)
    with pytest.raises(SystemExit):
        getattr(scripts, f"{script}_entry").main()
    assert message in capsys.readouterr().err


def note(item, ready):
    return item + ready


def double(item):
    return 2 * item


@pytest.mark.long
def test_workers_may_share_the_device(scripts):
    found = scripts.pool.run(double, note, [1, 2, 3], 2, quiet=False, alone=False)
    assert sorted(found) == [(1, 3), (2, 6), (3, 9)]
