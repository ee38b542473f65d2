"""The seconds that `optimize` is said to take: their arithmetic, and what is counted for it."""

import jax
import jax.numpy as jnp
import pytest

from pbjax.device import find_device
from pbjax.planning.profiling import Profile, Timing, fill, fill_corun
from pbjax.program.analysis import analyse
from pbjax.tuning.estimate import (
    OTHER_CALLS,
    PROBE_S,
    PROBES_PER_OPERATION,
    SECONDS_PER_ROOFLINE_SECOND,
    SPLIT_PROGRAMS,
    Work,
    estimate,
    timing_s,
    work_of,
)
from tests.fakes import provenance

NOTHING = Work(
    stage_programs=0, stage_operations=0, stage_s=(), programs=0, operations=0, call_s=0.0
)
WORK = Work(
    stage_programs=3,
    stage_operations=60,
    stage_s=(0.1, 0.1, 0.2),
    programs=2,
    operations=70,
    call_s=1.0,
)


def test_nothing_takes_no_time():
    assert estimate(NOTHING, PROBE_S, 2).seconds == 0


def test_compiling_and_timing_add_up():
    compiling = PROBES_PER_OPERATION * PROBE_S * (60 + 2 * 70) / 2
    calls = 2 * timing_s(SECONDS_PER_ROOFLINE_SECOND, OTHER_CALLS)
    stages = sum(timing_s(SECONDS_PER_ROOFLINE_SECOND * each, 2) for each in WORK.stage_s)
    assert estimate(WORK, PROBE_S, 2).seconds == pytest.approx(compiling + calls + stages)


def test_a_machine_that_compiles_at_half_the_speed_takes_twice_as_long():
    once, twice = (estimate(WORK, probe_s, 2).seconds for probe_s in (PROBE_S, 2 * PROBE_S))
    assert twice == pytest.approx(2 * once)


def test_a_short_function_is_timed_for_a_whole_sample():
    assert timing_s(1e-6, 2) == pytest.approx(5 * 0.02, rel=1e-3)
    assert timing_s(1.0, 2) == 7.0


def test_the_line_counts_programs_and_stages():
    text = str(estimate(WORK, PROBE_S, 2))
    assert text.endswith(": 5 programs to compile, 3 stages to measure")
    assert text.startswith("about 10 s")
    assert str(estimate(WORK, 100 * PROBE_S, 2)).startswith("about 16 minutes")


def layers(x):
    for _ in range(3):
        x = jax.nn.gelu(x @ jnp.eye(8))
    return x


def analysed(batch_size):
    return analyse(layers, (jnp.ones((batch_size, 8)),), device=find_device("cpu", num_cores=2))


def test_what_a_table_has_is_not_counted_again(tmp_path):
    analysis = analysed(6)
    work = work_of(analysis, tmp_path / "none.json")
    assert work.stage_programs == len(work.stage_s) > 0
    assert work.programs == 2 + SPLIT_PROGRAMS  # As written and in one loop.
    assert work.call_s > 0
    size = analysis.batch.batch_size
    from pbjax.planning.profile_grid import paired_runs, single_runs

    wanted = analysis.summary, size, analysis.device.num_sms, ()
    table = fill(
        Profile(provenance=provenance()),
        single_runs(*wanted),
        lambda run: Timing(median_s=1e-3, spread_s=0.0, samples=5),
    )
    table = fill_corun(
        table, paired_runs(*wanted), lambda *_: Timing(median_s=1e-3, spread_s=0.0, samples=5)
    )
    table.save(tmp_path / "table.json")
    known = work_of(analysis, tmp_path / "table.json")
    assert (known.stage_programs, known.stage_s) == (0, ())
    assert known.programs == 2 + SPLIT_PROGRAMS


def test_a_plan_and_a_batch_of_one_row_need_no_stages():
    assert work_of(analysed(6), None, planned=True).stage_programs == 0
    assert work_of(analysed(1), None).programs == 1
