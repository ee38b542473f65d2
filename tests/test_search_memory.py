"""Predicted memory, and the search under a limit: what it drops, and that it finds the same."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax import memory
from pbjax import search as search_module
from pbjax.candidates import Candidates
from pbjax.errors import MemoryBudgetError
from pbjax.memory import MemoryPredictor, predicted_bytes
from pbjax.profiling import Outline
from pbjax.schedule import PROLOGUE, Split, timetable
from pbjax.search import SearchOptions, best_staggers, search

from .search_tables import program, random_table, stage, table, with_budgets

WIDE, NARROW = stage("wide", held_bytes_per_row=100.0), stage("narrow", held_bytes_per_row=1.0)
PROGRAM = Outline(prologue=None, block=(WIDE, NARROW), epilogue=None, num_blocks=2, weight_bytes=30)
ENDS = Outline(
    prologue=stage("prologue", held_bytes_per_row=4.0),
    block=(WIDE, NARROW),
    epilogue=stage("epilogue", held_bytes_per_row=2.0),
    num_blocks=2,
    weight_bytes=1000,
    stacked_weight_bytes=600,
    input_bytes_per_row=10.0,
    output_bytes_per_row=300.0,
)


def with_memory(chance, outline):
    """The program with stages, inputs and outputs of random sizes."""

    def held(stage):
        return stage and replace(stage, held_bytes_per_row=chance.choice((0.0, 1.5, 40.0, 100.0)))

    return replace(
        outline,
        prologue=held(outline.prologue),
        block=tuple(held(each) for each in outline.block),
        epilogue=held(outline.epilogue),
        weight_bytes=chance.randint(0, 100),
        stacked_weight_bytes=chance.randint(0, 50),
        input_bytes_per_row=chance.choice((0.0, 3.0)),
        output_bytes_per_row=chance.choice((0.0, 7.0, 200.0)),
        waiting_bytes_per_row=chance.choice((0.0, 2.0, 80.0)),
    )


def walked_bytes(outline, split, staggers):
    """The same by walking every slot of the program, with what each sub-batch then holds."""
    part = outline.output_bytes_per_row if len(split.sizes) > 1 else 0.0
    copied = outline.stacked_weight_bytes if len(split.sizes) > 1 else 0
    per_row = outline.input_bytes_per_row + outline.output_bytes_per_row
    always = outline.weight_bytes + copied + split.batch_size * per_row
    chain = (outline.prologue, *outline.block, outline.epilogue)
    every = list(timetable(outline, staggers).slots())
    left = Counter(task.sub_batch for slot in every for task in slot)
    held, most = [0.0] * len(staggers), split.batch_size * part
    for slot in every:
        for task in slot:
            held[task.sub_batch] = chain[task.stage + 1].held_bytes_per_row
            if task.stage == len(outline.block):
                held[task.sub_batch] += part
            elif task.stage != PROLOGUE:
                held[task.sub_batch] += outline.waiting_bytes_per_row
        most = max(most, math.sumprod(split.sizes, held))
        left -= Counter(task.sub_batch for task in slot)
        for task in slot:
            if task.sub_batch not in left:
                held[task.sub_batch] = part
    return math.ceil(always + most)


# Predicted bytes


def test_bytes_are_the_weights_and_the_fullest_slot():
    assert predicted_bytes(PROGRAM, Split(sizes=(8,)), (0,)) == 30 + 800
    assert predicted_bytes(PROGRAM, Split(sizes=(4, 4)), (0, 0)) == 30 + 800
    assert predicted_bytes(PROGRAM, Split(sizes=(4, 4)), (0, 1)) == 30 + 404


def test_inputs_and_outputs_are_there_all_the_time():
    assert predicted_bytes(ENDS, Split(sizes=(8,)), (0,)) == 1000 + 8 * (10 + 300) + 800


def test_split_holds_stacked_weights_and_the_outputs_of_what_is_done():
    # In the last slot but one the first sub-batch is done, and the second writes its outputs.
    fixed = 1600 + 8 * (10 + 300)
    assert predicted_bytes(ENDS, Split(sizes=(6, 2)), (1, 0)) == fixed + 6 * 300 + 2 * (2 + 300)
    assert predicted_bytes(ENDS, Split(sizes=(6, 2)), (0, 1)) == fixed + 6 * (2 + 300) + 2 * 300


def test_sub_batches_that_have_not_begun_hold_nothing():
    late = replace(ENDS, epilogue=None, output_bytes_per_row=0.0, num_blocks=1)
    # Both stages of the first sub-batch are over when the second begins.
    assert predicted_bytes(late, Split(sizes=(3, 5)), (1, 0)) == 1600 + 80 + max(300, 500 + 3)


def test_steps_that_are_not_run_hold_nothing():
    once = replace(PROGRAM, num_blocks=1)
    assert predicted_bytes(once, Split(sizes=(4, 4)), (1, 0)) == 30 + 404


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_bytes_are_those_of_a_walk_over_every_slot(chance, num_stages, num_blocks, has_ends):
    outline = with_memory(chance, program(num_stages, num_blocks, has_ends))
    count = chance.randint(1, 3)
    split = Split(sizes=tuple(chance.randint(1, 20) for _ in range(count)))
    staggers = tuple(chance.randrange(num_stages) for _ in range(count))
    walked = walked_bytes(outline, split, staggers)
    assert predicted_bytes(outline, split, staggers) == walked
    fits = MemoryPredictor(outline).within
    assert fits(split.sizes, walked)(staggers)
    assert not fits(split.sizes, walked - 1)(staggers)


def test_no_slot_is_looked_at_where_everything_fits(monkeypatch):
    monkeypatch.setattr(memory, "timetable", None)
    assert MemoryPredictor(ENDS).within((5, 3), 1600 + 8 * (310 + 302))((0, 1))


# The search under a limit


class CheckedAtOnce(Candidates):
    """Candidates of which each is checked, slot by slot, before any is predicted."""

    def _fits(self, sizes):
        limit, outline = self.options.memory_limit_bytes, self.evaluator.outline
        split, every = Split(sizes=sizes), self.choices[len(sizes)]
        return {each for each in every if walked_bytes(outline, split, each) <= limit}.__contains__

    def _promising(self, sizes):
        return iter(list(super()._promising(sizes)))


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 40), st.integers(1, 3), st.booleans())
def test_search_finds_what_checking_every_candidate_does(
    chance, batch_size, num_stages, has_budgets
):
    outline = with_memory(chance, program(num_stages, chance.choice((1, 4)), chance.random() < 0.5))
    profile = random_table(chance, outline, batch_size)
    if has_budgets:
        profile = with_budgets(chance, outline, profile)
    whole = predicted_bytes(outline, Split(sizes=(batch_size,)), (0,))
    limit = round(whole * chance.uniform(0.6, 1.2))
    options = SearchOptions(memory_limit_bytes=limit)
    found, error = attempt(lambda: search(outline, profile, batch_size, options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "Candidates", CheckedAtOnce)
        expected, expected_error = attempt(lambda: search(outline, profile, batch_size, options))
    assert error == expected_error
    if found:
        unlike = {"seconds": 0.0, "dropped": 0}
        assert replace(found, **unlike) == replace(expected, **unlike)
        assert found.by_count == expected.by_count
        for each in found.by_count.values():
            assert walked_bytes(outline, each.split, each.staggers) <= limit


def attempt(run):
    """What is returned, or what is said in refusal."""
    try:
        return run(), None
    except MemoryBudgetError as error:
        return None, str(error)


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 16), st.integers(1, 3))
def test_small_batches_get_the_exhaustive_optimum_within_the_limit(chance, batch_size, num_stages):
    outline = with_memory(chance, program(num_stages, chance.choice((1, 4))))
    profile = random_table(chance, outline, batch_size)
    whole = predicted_bytes(outline, Split(sizes=(batch_size,)), (0,))
    options = SearchOptions(memory_limit_bytes=round(whole * chance.uniform(0.7, 1.2)))
    window, error = attempt(lambda: search(outline, profile, batch_size, options))
    exhaustive, said = attempt(lambda: search(outline, profile, batch_size, options, "exhaustive"))
    assert error == said
    assert error or window.best == exhaustive.best


def test_candidates_over_the_memory_limit_are_dropped():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    result = search(PROGRAM, profile, 8, SearchOptions(memory_limit_bytes=500))
    assert result.dropped > 0
    assert result.best.split != Split(sizes=(8,))
    for candidate in result.by_count.values():
        assert predicted_bytes(PROGRAM, candidate.split, candidate.staggers) <= 500


def test_limit_that_nothing_fits_is_refused_with_the_bytes():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    with pytest.raises(MemoryBudgetError, match=r"830 bytes .*100 bytes are allowed"):
        search(PROGRAM, profile, 8, SearchOptions(memory_limit_bytes=100))


def test_given_sizes_over_the_limit_are_refused():
    profile = table(PROGRAM, {2: 1.0, 8: 1.0})
    with pytest.raises(MemoryBudgetError, match=r"100 bytes are allowed"):
        best_staggers(PROGRAM, profile, Split(sizes=(4, 4)), SearchOptions(memory_limit_bytes=100))
