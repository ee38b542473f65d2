"""Which programs compete for a batch, which are not run for want of memory, and what is said."""

from dataclasses import replace

import jax
import pytest

from pbjax import errors
from pbjax.device import find_device
from pbjax.planning.memory import predicted_bytes
from pbjax.runtime.compilation import ProgramSpec
from pbjax.runtime.measured_programs import MeasuredProgram, program_label, programs_section
from pbjax.tuning import autotune as contest
from pbjax.tuning.autotune import _contenders
from pbjax.tuning.choices import Choice
from tests.fakes import FakeTimer, fake_measure
from tests.jobs import check_house_form, check_outputs, run, scan, small

DEVICE = find_device("cpu", num_cores=2)
BEST = ProgramSpec(
    sizes=(4, 2), staggers=(1, 0), predicted_s=1.0, sm_budgets={"TENSOR": 84, "MEMORY": 48}
)
OTHER = ProgramSpec(sizes=(2, 2, 2), staggers=(2, 1, 0), predicted_s=1.1)
SEQUENTIAL = ProgramSpec(sizes=(4, 2), staggers=(0, 0))


@pytest.fixture
def timer(monkeypatch):
    return FakeTimer().install(monkeypatch)


@pytest.fixture
def on_gpu(monkeypatch):
    """Blocks in a step matter, as on a GPU."""
    monkeypatch.setattr(contest, "overlap_options", lambda: {"graphs": True})


def choice(*specs, **options):
    return Choice(batch_size=6, specs=specs, **options)


def test_the_best_split_competes_without_staggers_without_budgets_and_unrolled(on_gpu):
    specs = _contenders(choice(BEST, OTHER), None, 11)
    unrolled = [replace(BEST, unroll=2), replace(BEST, unroll=11)]
    bare = replace(BEST, sm_budgets={}, predicted_s=None)
    assert specs == (BEST, OTHER, SEQUENTIAL, bare, *unrolled)


def test_budgets_and_unrolling_that_change_nothing_do_not_compete():
    bare = replace(BEST, sm_budgets={})
    assert _contenders(choice(bare), None, 11) == (bare, SEQUENTIAL)


@pytest.mark.parametrize(("steps", "unrolls"), [(0, []), (1, []), (2, [2]), (5, [2, 5]), (31, [2])])
def test_no_more_blocks_are_unrolled_than_the_loop_has_or_compile_soon(on_gpu, steps, unrolls):
    found = [spec.unroll for spec in _contenders(choice(OTHER), None, steps)]
    assert [unroll for unroll in found if unroll > 1] == unrolls


def test_a_given_unroll_holds_for_all_and_a_settled_split_has_no_rivals(on_gpu):
    assert {spec.unroll for spec in _contenders(choice(BEST, OTHER), 3, 11)} == {3}
    given = _contenders(choice(BEST, reason="split was given"), None, 11)
    assert given == (BEST, SEQUENTIAL)
    assert _contenders(choice(SEQUENTIAL), None, 11) == (SEQUENTIAL,)
    assert _contenders(choice(), None, 11) == ()


def test_fastest_of_budgets_and_unrolls_is_kept_and_stands_in_the_plan(timer, on_gpu, monkeypatch):
    def with_unrolls(programs, leaves, progress):
        timed = fake_measure({"unsplit": 3e-3, "sequential": 4e-3, "split": 2e-3})
        found = timed(programs, leaves, progress)
        return tuple(
            replace(row, measured_s=row.measured_s / made.spec.unroll, unroll=made.spec.unroll)
            for row, made in zip(found, programs, strict=True)
        )

    monkeypatch.setattr(contest, "measure", with_unrolls)
    network = scan(4)
    fast = run(network, 6)
    assert fast.plan.decision == "split"
    assert fast.plan.unroll == 3
    assert "unroll 3" in fast.plan.reason
    assert fast.plan.measured.split == pytest.approx(2e-3 / 3)
    check_outputs(fast, network, 6)


def test_split_that_does_not_fit_the_device_is_not_run_and_the_report_says_so(timer, monkeypatch):
    run_splits = []
    verify = contest.verify

    def spy(analysis, leaves, programs, *rest):
        run_splits.extend(programs)
        return verify(analysis, leaves, programs, *rest)

    monkeypatch.setattr(contest, "verify", spy)
    fast = run(small(), 6, device=replace(DEVICE, memory_bytes=10))
    assert fast.plan.decision == "unsplit"
    assert "no split fits the device" in fast.plan.reason
    assert run_splits == []
    assert "GB are there: not run" in str(fast.report())
    check_outputs(fast, small(), 6)


def test_split_that_fits_is_run_beside_one_that_does_not(timer, monkeypatch):
    compile_all = contest.compile_all

    def heavy(*args):
        made = compile_all(*args)
        return [replace(m, needed_bytes=10**12) if len(m.spec.sizes) == 3 else m for m in made]

    monkeypatch.setattr(contest, "compile_all", heavy)
    report = run(small(), 6).report()
    assert {len(program.sizes) for program in report.programs} == {1, 2}
    assert any("needs 1e+03 GB" in warning for warning in report.warnings)


def test_given_split_that_does_not_fit_is_refused(timer):
    with pytest.raises(errors.MemoryBudgetError, match="GB are there") as error:
        run(small(), 6, split=(3, 3), device=replace(DEVICE, memory_bytes=10))
    check_house_form(error)


def test_given_split_takes_turns_where_staggers_are_predicted_not_to_fit(timer, monkeypatch):
    free = run(small(), 6, split=(3, 3))
    room = predicted_bytes(free.report().summary, (3, 3), (0, 0))
    # What the compiled programs need is checked apart.
    monkeypatch.setattr(contest, "device_room", lambda device: 10**12)
    tight = run(small(), 6, split=(3, 3), device=replace(DEVICE, memory_bytes=room))
    assert any(free.plan.staggers)
    assert tight.plan.staggers == (0, 0)


def test_memory_that_a_program_plans_holds_weights_inputs_and_outputs(timer):
    network = scan(4)
    report = run(network, 6, split=(3, 3)).report()
    (inputs,) = network.inputs(6)
    assert all(program.needed_bytes > 2 * inputs.nbytes for program in report.programs)


def test_programs_are_finished_in_the_order_they_were_asked_for(timer):
    report = run(scan(4), 6).report()
    names = [program.name for program in report.programs]
    assert names[0] == "unsplit"
    assert names[-1] == "sequential"
    assert all(program.compile_s > 0 for program in report.programs)


def test_what_jax_was_given_of_the_device_limits_too(monkeypatch):
    class Shared:
        def memory_stats(self):
            return {"bytes_limit": 70}

    monkeypatch.setattr(jax, "devices", lambda: [Shared()])
    assert contest.device_room(replace(DEVICE, memory_bytes=100)) == 70
    assert contest.device_room(replace(DEVICE, memory_bytes=50)) == 50


def test_overlap_of_the_fastest_staggered_program_is_reported(timer, monkeypatch):
    seconds = {"unsplit": 2e-3, "split": 1e-3, "sequential": 4e-3}
    monkeypatch.setattr(contest, "measure", fake_measure(seconds))
    monkeypatch.setattr(contest, "overlapped_share", lambda *_: 0.42)
    report = run(small(), 6).report()
    shares = [p.overlapped_share for p in report.programs if p.overlapped_share is not None]
    assert shares == [0.42]
    assert "42%" in str(report)


def measured(**changes):
    row = MeasuredProgram(
        name="split",
        sizes=(3, 3),
        staggers=(1, 0),
        predicted_s=0.9e-3,
        measured_s=1e-3,
        spread_s=1e-5,
        temporary_bytes=2_000_000,
        weight_bytes=0,
        compile_s=1.0,
        needed_bytes=7_000_000,
    )
    return replace(row, **changes)


def test_prediction_is_compared_with_the_measurement():
    assert measured().prediction_error == pytest.approx(-0.1)
    assert measured(predicted_s=None).prediction_error is None
    assert "-10%" in programs_section((measured(),), 6)


def test_memory_is_listed_beside_the_times():
    text = programs_section((measured(), measured(needed_bytes=0)), 6)
    rows = text.split("memory:")[1].splitlines()[-2:]
    assert rows[0].split() == ["split", "3+3", "2.0", "0.0", "7.0", "1.0"]
    assert rows[1].split()[4] == "-"


def test_labels_name_budgets_and_unrolled_blocks():
    assert program_label("split", {}, 1) == "split"
    budgets = {"TENSOR": 84, "MEMORY": 48}
    assert program_label("split", budgets, 2) == "split, TENSOR 84 MEMORY 48 SMs, unroll 2"
