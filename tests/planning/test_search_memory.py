"""Predicted memory, and the search under a limit: what it drops, and that it finds the same."""

import math
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.errors import MemoryBudgetError
from pbjax.planning import search as search_module
from pbjax.planning.candidates import Candidates
from pbjax.planning.memory import TOGETHER, predicted_bytes
from pbjax.planning.profiling import ProgramSummary
from pbjax.planning.search import SearchOptions, best_staggers, search
from pbjax.planning.timetable import Split
from pbjax.tuning.measured_table import Measurements
from pbjax.tuning.shortlist import best_splits, no_split_reason, search_within
from tests.search_tables import program, random_table, stage, table, with_budgets

WIDE, NARROW = stage("wide", held_bytes_per_row=100.0), stage("narrow", held_bytes_per_row=1.0)
PROGRAM = ProgramSummary(
    prologue=None, block=(WIDE, NARROW), epilogue=None, num_blocks=2, weight_bytes=30
)
ENDS = ProgramSummary(
    prologue=stage("prologue", held_bytes_per_row=4.0),
    block=(WIDE, NARROW),
    epilogue=stage("epilogue", held_bytes_per_row=2.0),
    num_blocks=2,
    weight_bytes=1000,
    stacked_weight_bytes=600,
    input_bytes_per_row=10.0,
    output_bytes_per_row=40.0,
    carried_bytes_per_row=5.0,
    waiting_bytes_per_row=3.0,
)
# Weights, inputs and outputs of eight rows, unsplit and split.
WHOLE, PARTS = 1000 + 8 * 50, 1600 + 8 * 50


def with_memory(chance, summary):
    """The program with stages, inputs and outputs of random sizes."""

    def held(stage):
        return stage and replace(stage, held_bytes_per_row=chance.choice((0.0, 1.5, 40.0, 100.0)))

    block = tuple(held(each) for each in summary.block)
    return replace(
        summary,
        prologue=held(summary.prologue),
        block=block,
        epilogue=held(summary.epilogue),
        weight_bytes=chance.randint(0, 100),
        stacked_weight_bytes=chance.randint(0, 50),
        input_bytes_per_row=chance.choice((0.0, 3.0)),
        output_bytes_per_row=chance.choice((0.0, 7.0, 200.0)),
        # The first stage holds what it is handed.
        carried_bytes_per_row=chance.choice((0.0, 0.5, 1.0)) * block[0].held_bytes_per_row,
        waiting_bytes_per_row=chance.choice((0.0, 2.0, 80.0)),
    )


# Predicted bytes


def test_unsplit_batch_holds_its_fullest_stage():
    assert predicted_bytes(PROGRAM, (8,), (0,)) == 30 + 800
    assert predicted_bytes(ENDS, (8,), (0,)) == WHOLE + 8 * (100 + 3)
    full = replace(ENDS, epilogue=stage("epilogue", held_bytes_per_row=200.0))
    assert predicted_bytes(full, (8,), (0,)) == WHOLE + 8 * 200


def test_sub_batches_in_turns_keep_what_their_next_block_reads():
    assert predicted_bytes(ENDS, (6, 2), (0, 0)) == PARTS + 6 * (100 + 3) + 2 * (5 + 3)
    assert predicted_bytes(ENDS, (3, 3, 2), (0, 0, 0)) == PARTS + 3 * (100 + 3) + 5 * (5 + 3)


def test_parts_of_large_outputs_wait_for_the_last():
    large = replace(ENDS, output_bytes_per_row=1000.0)
    assert predicted_bytes(large, (6, 2), (0, 0)) == 1680 + 8 * 1000 + 8 * 1000 + 6 * 2


@pytest.mark.parametrize("staggers", [(0, 1), (1, 0), (1, 1)])
def test_staggered_sub_batches_share_no_buffer(staggers):
    expected = PARTS + TOGETHER * 8 * (100 + 3) + 8 * 40
    assert predicted_bytes(ENDS, (6, 2), staggers) == math.ceil(expected)


# The search under a limit


class EachChecked(Candidates):
    """Candidates of which none is left out before its own memory is predicted."""

    def _choices(self, count):
        if self.options.staggers is not None:
            return sorted(set(permutations(self.options.staggers[:count])))
        stages = range(len(self.evaluator.summary.block))
        return [each for each in product(stages, repeat=count) if min(each) == 0]

    def _allowed(self, sizes):
        limit, summary = self.options.memory_limit_bytes, self.evaluator.summary
        every = self.choices[len(sizes)]
        return [each for each in every if predicted_bytes(summary, sizes, each) <= limit]


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.integers(2, 40), st.integers(1, 3), st.booleans())
def test_search_finds_what_checking_every_candidate_does(
    chance, batch_size, num_stages, has_budgets
):
    summary = with_memory(chance, program(num_stages, chance.choice((1, 4)), chance.random() < 0.5))
    profile = random_table(chance, summary, batch_size)
    if has_budgets:
        profile = with_budgets(chance, summary, profile)
    whole = predicted_bytes(summary, (batch_size,), (0,))
    limit = round(whole * chance.uniform(0.5, 2.5))
    options = SearchOptions(memory_limit_bytes=limit)
    found, error = attempt(lambda: search(summary, profile, batch_size, options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "Candidates", EachChecked)
        expected, expected_error = attempt(lambda: search(summary, profile, batch_size, options))
    assert error == expected_error
    if found:
        assert found.best == expected.best
        assert found.by_count == expected.by_count
        for each in found.by_count.values():
            assert predicted_bytes(summary, each.split.sizes, each.staggers) <= limit


def attempt(run):
    """What is returned, or what is said in refusal."""
    try:
        return run(), None
    except MemoryBudgetError as error:
        return None, str(error)


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.integers(2, 16), st.integers(1, 3))
def test_small_batches_get_the_exhaustive_optimum_within_the_limit(chance, batch_size, num_stages):
    summary = with_memory(chance, program(num_stages, chance.choice((1, 4))))
    profile = random_table(chance, summary, batch_size)
    whole = predicted_bytes(summary, (batch_size,), (0,))
    options = SearchOptions(memory_limit_bytes=round(whole * chance.uniform(0.5, 2.5)))
    window, error = attempt(lambda: search(summary, profile, batch_size, options))
    exhaustive, said = attempt(lambda: search(summary, profile, batch_size, options, "exhaustive"))
    assert error == said
    assert error or window.best == exhaustive.best


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    st.lists(st.integers(1, 30), min_size=2, max_size=3),
)
def test_sub_batches_in_turns_take_no_more_than_staggered(chance, num_stages, sizes):
    summary = with_memory(chance, program(num_stages))
    none, last = [0] * len(sizes), [*[0] * (len(sizes) - 1), 1]
    staggered = predicted_bytes(summary, sizes, last)
    assert predicted_bytes(summary, sizes, none) <= staggered
    # Which candidates are left out before their sizes are known rests on this.
    assert staggered == predicted_bytes(
        summary, [sum(sizes) - len(sizes) + 1, *[1] * (len(sizes) - 1)], last
    )


def test_candidates_over_the_memory_limit_are_dropped():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    result = search(PROGRAM, profile, 8, SearchOptions(memory_limit_bytes=500))
    assert result.dropped > 0
    assert result.best.split != Split(sizes=(8,))
    for candidate in result.by_count.values():
        assert predicted_bytes(PROGRAM, candidate.split.sizes, candidate.staggers) <= 500


def test_limit_that_nothing_fits_is_refused_with_the_bytes():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    with pytest.raises(MemoryBudgetError, match=r"830 bytes .*100 bytes are allowed"):
        search(PROGRAM, profile, 8, SearchOptions(memory_limit_bytes=100))


def test_given_sizes_over_the_limit_are_refused():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    with pytest.raises(MemoryBudgetError, match=r"100 bytes are allowed"):
        best_staggers(PROGRAM, profile, Split(sizes=(4, 4)), SearchOptions(memory_limit_bytes=100))


# What optimize builds


def test_splits_are_searched_within_the_memory_of_the_device():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    measurements = Measurements(
        profile=profile, summary=PROGRAM, relabelled=PROGRAM, rows_measured=0, warning=""
    )
    free, tight, none = (search_within(measurements, 8, room) for room in (10**9, 900, 100))
    assert free == replace(search(PROGRAM, profile, 8), seconds=free.seconds)
    needed = [
        max(predicted_bytes(PROGRAM, s.sizes, s.staggers) for s in best_splits(found))
        for found in (free, tight)
    ]
    assert needed[0] > 900 >= needed[1]
    assert [len(spec.sizes) for spec in best_splits(tight)] == [2, 3]
    assert tight.dropped > 0
    # Nothing is predicted to fit: what the compiled programs need decides.
    assert best_splits(none) == best_splits(free)


def test_batch_of_which_no_split_is_predicted_to_fit_says_so():
    heavy = replace(PROGRAM, stacked_weight_bytes=10_000)
    measurements = Measurements(
        profile=table(heavy, {2: 1.0, 8: 1.0}),
        summary=heavy,
        relabelled=heavy,
        rows_measured=0,
        warning="",
    )
    found = search_within(measurements, 8, 5000)
    assert best_splits(found) == ()
    assert no_split_reason(found, 8, 5000) == "no split is predicted to fit in 5e-06 GB"
