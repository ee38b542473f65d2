"""Which programs compete for a batch, which are not run for want of memory, and what is said."""

from dataclasses import replace

import jax
import pytest

from pbjax import errors
from pbjax.device import find_device
from pbjax.planning.memory import predicted_bytes
from pbjax.program.analysis import analyse
from pbjax.runtime.compilation import ProgramSpec
from pbjax.runtime.execution import SubBatchState
from pbjax.runtime.measured_programs import MeasuredProgram, program_label, programs_section
from pbjax.tuning import autotune, calls, shortlist, whole_batch
from pbjax.tuning.shortlist import _rivals, _unrolls
from pbjax.tuning.whole_batch import whole_programs
from tests.fakes import FakeTimer, fake_measure
from tests.jobs import check_house_form, check_outputs, run, scan, small
from tests.networks import NETWORKS

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
    monkeypatch.setattr(shortlist, "on_gpu", lambda: True)


def test_the_best_split_competes_without_staggers_without_budgets_and_unrolled(on_gpu):
    unrolled = [replace(BEST, unroll=2), replace(BEST, unroll=11)]
    bare = replace(BEST, sm_budgets={}, predicted_s=None)
    assert _rivals((BEST, OTHER), _unrolls(11)) == (SEQUENTIAL, bare, *unrolled)


def test_budgets_and_unrolling_that_change_nothing_do_not_compete():
    bare = replace(BEST, sm_budgets={})
    assert _rivals((bare,), _unrolls(1)) == (SEQUENTIAL,)


@pytest.mark.parametrize(("steps", "unrolls"), [(0, []), (1, []), (2, [2]), (5, [2, 5]), (31, [2])])
def test_no_more_blocks_are_unrolled_than_the_loop_has_or_compile_soon(on_gpu, steps, unrolls):
    assert _unrolls(steps) == unrolls
    found = [spec.unroll for spec in _rivals((OTHER,), _unrolls(steps))]
    assert [unroll for unroll in found if unroll > 1] == unrolls


def test_a_given_unroll_holds_for_all_and_a_split_without_staggers_has_no_rivals(on_gpu):
    given = replace(BEST, unroll=3)
    assert {spec.unroll for spec in _rivals((given, OTHER))} == {3}
    assert _rivals((SEQUENTIAL,), _unrolls(11)) == ()


def test_fastest_of_budgets_and_unrolls_is_kept_and_stands_in_the_plan(timer, on_gpu, monkeypatch):
    def with_unrolls(*args):
        measure = fake_measure({"unsplit": 3e-3, "sequential": 4e-3, "split": 2e-3})
        return [
            replace(each, seconds=tuple(s / each.spec.unroll for s in each.seconds))
            for each in measure(*args)
        ]

    monkeypatch.setattr(autotune, "measure", with_unrolls)
    network = scan(4)
    fast = run(network, 6)
    assert fast.plan.decision == "split"
    assert fast.plan.unroll == 3
    assert "unroll 3" in fast.plan.reason
    assert fast.plan.measured.split == pytest.approx(2e-3 / 3)
    check_outputs(fast, network, 6)


@pytest.mark.parametrize(
    ("network", "variant"), [(scan(3), "unrolled"), (NETWORKS["function_loop"](3), "scanned")]
)
def test_layers_compete_in_a_loop_and_written_out(timer, monkeypatch, network, variant):
    """The other way to run them is kept where it is faster, and the plan builds it again."""

    def faster(*args):
        measure = fake_measure({"unsplit": 3e-3, "sequential": 4e-3, "split": 4e-3})
        return [
            replace(each, seconds=tuple(s / 2 for s in each.seconds)) if each.spec.variant else each
            for each in measure(*args)
        ]

    monkeypatch.setattr(autotune, "measure", faster)
    fast = run(network, 6)
    assert (fast.plan.decision, fast.plan.layers) == ("unsplit", variant)
    assert fast.plan.measured.unsplit == pytest.approx(1.5e-3)
    assert f"unsplit, {variant}" in fast.plan.reason
    check_outputs(fast, network, 6)
    again = run(network, 6, plan=fast.plan)
    assert again.plan == fast.plan
    check_outputs(again, network, 6)


@pytest.mark.parametrize(
    ("network", "named"), [(NETWORKS["function_loop"](3), "unsplit, scanned 6"), (scan(3), "split")]
)
def test_programs_beyond_the_rule_are_left_out_and_the_whole_batch_kept(
    timer, monkeypatch, network, named
):
    run_stage = SubBatchState._run_stage

    def wrong(self, index, block):
        run_stage(self, index, block)
        scale = {value: x * 1.01 for value, x in self.live.items() if x.dtype == "float32"}
        self.live.update(scale)

    monkeypatch.setattr(SubBatchState, "_run_stage", wrong)
    fast = run(network, 6)
    assert (fast.plan.decision, fast.plan.layers) == ("unsplit", "as given")
    assert f"{named}" in fast.plan.reason
    assert "output 0 differs by" in fast.plan.reason
    assert any("not run" in warning for warning in fast.report().warnings)
    assert {len(program.sizes) for program in fast.report().programs} <= {1}
    check_outputs(fast, network, 6)


def test_the_whole_batch_as_one_graph_has_its_layers_written_out(monkeypatch):
    monkeypatch.setattr(whole_batch, "overlap_options", lambda: {"graphs": True})
    variants = [
        [spec.variant for spec in whole_programs(analysed(network))]
        for network in (scan(3), NETWORKS["function_loop"](3), small())
    ]
    assert variants == [
        ["", "unrolled", "unrolled, one graph"],
        ["", "scanned", "one graph"],
        ["", "one graph"],
    ]


def analysed(network):
    inputs = network.inputs(6)
    return analyse(network.model, inputs, device=DEVICE, variables=network.variables)


def test_a_gain_of_the_whole_batch_inside_the_noise_keeps_the_model_as_written(timer, monkeypatch):
    seconds = {"unsplit": 2e-3, "sequential": 4e-3, "split": 4e-3}
    monkeypatch.setattr(autotune, "measure", fake_measure(seconds))
    assert run(scan(3), 6).plan.layers == "as given"


def test_split_that_does_not_fit_the_device_is_not_run_and_the_report_says_so(timer, monkeypatch):
    verified = []
    differences = calls.CallWorkload.differences

    def spy(self, programs, *rest):
        verified.extend(programs)
        return differences(self, programs, *rest)

    monkeypatch.setattr(calls.CallWorkload, "differences", spy)
    fast = run(small(), 6, device=replace(DEVICE, memory_bytes=10))
    assert fast.plan.decision == "unsplit"
    assert "no split fits the device" in fast.plan.reason
    assert verified == []
    assert "GB are there: not run" in str(fast.report())
    check_outputs(fast, small(), 6)


def test_split_that_fits_is_run_beside_one_that_does_not(timer, monkeypatch):
    compile_all = autotune.compile_all

    def heavy(*args):
        made = compile_all(*args)
        return [replace(m, needed_bytes=10**12) if len(m.spec.sizes) == 3 else m for m in made]

    monkeypatch.setattr(autotune, "compile_all", heavy)
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
    monkeypatch.setattr(autotune, "device_room", lambda device: 10**12)
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
    assert autotune.device_room(replace(DEVICE, memory_bytes=100)) == 70
    assert autotune.device_room(replace(DEVICE, memory_bytes=50)) == 50


def test_overlap_of_the_fastest_staggered_program_is_reported(timer, monkeypatch):
    seconds = {"unsplit": 2e-3, "split": 1e-3, "sequential": 4e-3}
    monkeypatch.setattr(autotune, "measure", fake_measure(seconds))
    monkeypatch.setattr(calls.CallWorkload, "overlapped_fraction", lambda *_: 0.42)
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
