"""Timetables: every stage of every sub-batch once, after its predecessor."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.planning.program_summary import ProgramSummary, StageInfo
from pbjax.planning.timetable import PROLOGUE, Split, Task, timetable


def stage(name):
    return StageInfo(
        name=name,
        fingerprint=sha256(name.encode()).hexdigest()[:12],
        resource=ResourceClass.CUDA,
        dtype="float32",
        shape=(4,),
        flops_per_row=1.0,
        bytes_per_row=1.0,
        weight_bytes=0,
    )


@st.composite
def programs(draw):
    # Plain data: the run-time type checks draw random numbers, which a strategy must not.
    num_stages = draw(st.integers(1, 7))
    ends = draw(st.booleans()), draw(st.booleans())
    staggers = draw(st.lists(st.integers(0, num_stages - 1), min_size=1, max_size=3))
    return num_stages, draw(st.integers(1, 6)), ends, tuple(staggers)


def build(program):
    num_stages, num_blocks, (has_prologue, has_epilogue), staggers = program
    summary = ProgramSummary(
        prologue=stage("prologue") if has_prologue else None,
        block=tuple(stage(f"s{i}") for i in range(num_stages)),
        epilogue=stage("epilogue") if has_epilogue else None,
        num_blocks=num_blocks,
    )
    return summary, staggers


def path(summary):
    """What one sub-batch has to run, in order."""
    stages = range(len(summary.block))
    prologue = [(0, PROLOGUE)] if summary.prologue else []
    epilogue = [(summary.num_blocks - 1, len(summary.block))] if summary.epilogue else []
    body = [(block, index) for block in range(summary.num_blocks) for index in stages]
    return prologue + body + epilogue


@given(programs())
def test_every_sub_batch_runs_its_whole_path_in_order(program):
    summary, staggers = build(program)
    slots = list(timetable(summary, staggers).slots())
    for j in range(len(staggers)):
        ran = [(task.block, task.stage) for slot in slots for task in slot if task.sub_batch == j]
        assert ran == path(summary)


@given(programs())
def test_a_slot_holds_at_most_one_task_of_a_sub_batch_and_is_never_empty(program):
    for slot in timetable(*build(program)).slots():
        numbers = [task.sub_batch for task in slot]
        assert numbers == sorted(set(numbers))
        assert numbers


@given(programs())
def test_every_sub_batch_is_busy_without_gaps(program):
    summary, staggers = build(program)
    slots = list(timetable(summary, staggers).slots())
    for j in range(len(staggers)):
        busy = [i for i, slot in enumerate(slots) if any(task.sub_batch == j for task in slot)]
        assert busy == list(range(busy[0], busy[0] + summary.num_stages_total))


@given(programs())
def test_steady_step_is_written_once_whatever_the_number_of_blocks(program):
    summary, staggers = build(program)
    table = timetable(summary, staggers)
    assert len(table.steady) == len(summary.block)
    assert all(task.block in (0, 1) for slot in table.steady for task in slot)


def test_staggered_block_of_three_is_laid_out_as_drawn():
    summary = ProgramSummary(
        prologue=stage("in"),
        block=(stage("a"), stage("b"), stage("c")),
        epilogue=stage("out"),
        num_blocks=2,
    )
    table = timetable(summary, (0, 2))
    drawn = [[(task.sub_batch, task.stage, task.block) for task in slot] for slot in table.slots()]
    assert drawn == [
        [(1, -1, 0)],
        [(1, 0, 0)],
        [(0, -1, 0), (1, 1, 0)],
        [(0, 0, 0), (1, 2, 0)],
        [(0, 1, 0), (1, 0, 1)],
        [(0, 2, 0), (1, 1, 1)],
        [(0, 0, 1), (1, 2, 1)],
        [(0, 1, 1), (1, 3, 1)],
        [(0, 2, 1)],
        [(0, 3, 1)],
    ]


def test_one_stage_without_ends_is_one_slot():
    summary = ProgramSummary(prologue=None, block=(stage("only"),), epilogue=None, num_blocks=1)
    table = timetable(summary, (0,))
    assert list(table.slots()) == [(Task(sub_batch=0, stage=0, block=0),)]
    assert table.fill == ()


@pytest.mark.parametrize("staggers", [(), (0, 0, 0, 0), (-1,), (0, 2)])
def test_foreign_staggers_are_refused(staggers):
    summary = ProgramSummary(
        prologue=None, block=(stage("a"), stage("b")), epilogue=None, num_blocks=1
    )
    with pytest.raises(InputError, match=r"staggers from 0 to 1 are allowed"):
        timetable(summary, staggers)


@pytest.mark.parametrize("sizes", [(), (0,), (4, 0), (1, 1, 1, 1), (3, -1)])
def test_foreign_sizes_are_refused(sizes):
    with pytest.raises(InputError, match=r"one to 3 sizes of at least one row"):
        Split(sizes=sizes)


def test_split_adds_up_to_the_batch():
    assert Split(sizes=(48, 32, 16)).batch_size == 96
    assert (Split(sizes=(1, 1, 1)).batch_size, Split(sizes=(1,)).batch_size) == (3, 1)


def test_program_without_stages_is_refused():
    with pytest.raises(InputError, match=r"0 stages"):
        ProgramSummary(prologue=None, block=(), epilogue=None, num_blocks=1)


def test_equal_stages_are_measured_once():
    a, b = stage("a"), stage("b")
    summary = ProgramSummary(prologue=None, block=(a, b, a), epilogue=b, num_blocks=12)
    assert summary.stages == (a, b)
    assert summary.num_stages_total == 37
