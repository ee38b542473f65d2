"""A decode step that holds its state in pieces computes what the function does, call after call."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import pbjax
from pallas_kernels import dispatch
from pallas_kernels.testing import assert_close
from pbjax.decode.state import StateLayout
from pbjax.device import find_device
from pbjax.errors import InputError, InputTypeError, ModelError, PbjaxWarning
from pbjax.runtime.compilation import CompiledProgram, ProgramSpec
from pbjax.tuning.autotune import _decide
from pbjax.tuning.shortlist import Shortlist
from pbjax.tuning.workload import TimedProgram
from tests.cases import long_but
from tests.kernel_decoder import LAYERS, B, F, decode_step, inputs


class Cache(NamedTuple):
    layers: list
    lengths: jax.Array


class Output(NamedTuple):
    hidden: jax.Array
    cache: Cache


def step(x, cache):
    hidden, layers = decode_step(x, cache.layers, cache.lengths)
    return Output(hidden, Cache(layers, cache.lengths + 1))


def example(batch_size=B):
    x, layers, lengths = inputs(batch_size)
    return x, Cache(layers, lengths // 2 + 1)


@pytest.fixture(scope="module")
def interleaved():
    """Optimised as on a Hopper GPU, where kernels are operations that can share launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "targets_hopper", lambda: True)
        patch.setattr("pbjax.tuning.autotune.NOISE_FACTOR", -1e9)
        patch.setattr("pbjax.decode.search.HOPELESS", float("inf"))
        return pbjax.optimize(step, *example(), state=1)


@pytest.fixture(scope="module")
def unsplit():
    return pbjax.optimize(step, *example(), state=1)


def run_both(fast, steps=3):
    x, cache = example()
    held, expected = fast.hold(jax.tree.map(jnp.copy, cache)), cache
    for i in range(steps):
        out, want = fast(x + i, held), step(x + i, expected)
        assert isinstance(out, Output)
        assert_close(out.hidden, want.hidden.astype(jnp.float32), reduction=F, roundings=8 * LAYERS)
        held, expected = out.cache, want.cache
    return fast.release(held), expected


def assert_same_cache(got, want):
    assert (got.lengths == want.lengths).all()
    for a, b in zip(jax.tree.leaves(got.layers), jax.tree.leaves(want.layers), strict=True):
        assert_close(a, b.astype(jnp.float32), reduction=F, roundings=8 * LAYERS)


def test_an_interleaved_step_is_the_function_call_after_call(interleaved):
    assert interleaved.plan.decision == "split"
    assert len(interleaved.plan.sizes) == 2
    assert_same_cache(*run_both(interleaved))


def test_without_kernels_the_step_runs_unsplit_and_says_why(unsplit):
    assert unsplit.plan.decision == "unsplit"
    assert "can share a launch" in unsplit.plan.reason
    text = str(unsplit.report())
    assert "nothing can overlap: no compute and no memory kernels; the matrix" in text
    assert "0 operations" not in text
    assert_same_cache(*run_both(unsplit))


def test_the_report_tells_what_rides_and_what_was_measured(interleaved):
    text = str(interleaved.report())
    assert all(name in text for name in ("interleaved", "sequential", "unsplit"))
    assert f"{4 * LAYERS} compute kernels and {LAYERS} memory kernels" in text
    measured = interleaved.plan.measured
    assert all(s > 0 for s in (measured.unsplit, measured.sequential, measured.split))
    assert interleaved.report().to_dict()["plan"]["sizes"] == interleaved.plan.sizes


def test_a_state_is_used_up_by_a_call(unsplit):
    x, cache = example()
    held = unsplit.hold(jax.tree.map(jnp.copy, cache))
    unsplit(x, held)
    with pytest.raises(InputError, match="used up by an earlier call"):
        unsplit(x, held)


def test_a_state_that_was_used_up_is_not_held_again(unsplit):
    x, cache = example()
    unsplit(x, unsplit.hold(cache))
    with pytest.raises(InputError, match="hold: an array of the state was used up"):
        unsplit.hold(cache)
    with pytest.raises(InputError, match="was used up"):
        pbjax.optimize(step, x, cache, state=1)


def test_a_call_that_is_traced_is_refused_and_the_state_stays(unsplit):
    x, cache = example()
    held = unsplit.hold(jax.tree.map(jnp.copy, cache))
    with pytest.raises(InputTypeError, match="step: an input is being traced"):
        jax.jit(lambda x: unsplit(x, held).hidden)(x)
    unsplit(x, held)
    with pytest.raises(InputTypeError, match="hold: an input is being traced"):
        jax.jit(lambda cache: unsplit.hold(cache))(cache)


def test_a_state_belongs_to_its_step(interleaved, unsplit):
    x, cache = example()
    with pytest.raises(InputError, match="another step's"):
        unsplit(x, interleaved.hold(cache))


def test_a_state_that_is_not_held_is_refused(unsplit):
    x, cache = example()
    with pytest.raises(InputTypeError, match=r"step\.hold"):
        unsplit(x, cache)
    with pytest.raises(InputTypeError, match="planned for"):
        unsplit.hold(cache.layers)


@pytest.mark.parametrize(
    ("function", "state", "message"),
    [
        (step, 2, "there are 2 inputs"),
        (lambda x, cache: x + 1, 1, "returns 0 values like that input"),
        (lambda x, cache: (x + 1, cache, cache), 1, "returns 2 values like that input"),
        (lambda x, cache: Output(x + 1, Cache(cache.layers, cache.lengths * 1.0)), 1, "returns 0"),
    ],
)
def test_a_function_that_does_not_carry_the_state_is_refused(function, state, message):
    with pytest.raises((InputError, ModelError), match=message):
        pbjax.optimize(function, *example(), state=state)


def test_options_of_functions_without_state_are_refused():
    with pytest.raises(InputError, match="leave out buckets="):
        pbjax.optimize(step, *example(), state=1, buckets=(8, 16))
    with pytest.raises(InputError, match="unroll= is given too"):
        pbjax.optimize(step, *example(), state=1, unroll=2)


def on_hopper(**options):
    """Optimised as for a Hopper GPU; what is returned runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "targets_hopper", lambda: True)
        return pbjax.optimize(step, *example(), state=1, **options)


@pytest.mark.parametrize(("split", "decision"), [((10, 6), "split"), ((B,), "unsplit")])
def test_a_given_split_is_run_even_if_it_is_slower(split, decision):
    fast = on_hopper(split=split)
    assert (fast.plan.sizes, fast.plan.decision) == (split, decision)
    assert fast.plan.reason == f"split={split} was given"
    assert_same_cache(*run_both(fast, steps=1))


@pytest.mark.parametrize("split", [(6, 5, 5), (15, 1)])
def test_a_split_that_a_step_cannot_run_is_refused(split):
    with pytest.raises(InputError, match="one or two sub-batches"):
        on_hopper(split=split)


def test_a_split_of_another_batch_is_refused():
    with pytest.raises(InputError, match="adds up to 12"):
        on_hopper(split=(6, 6))


def test_a_split_and_a_plan_are_refused(interleaved):
    with pytest.raises(InputError, match="both say what to run"):
        on_hopper(split=(8, 8), plan=interleaved.plan)


def test_a_saved_plan_is_run_without_measuring(interleaved, tmp_path):
    interleaved.plan.save(tmp_path / "plan.json")
    fast = on_hopper(plan=tmp_path / "plan.json")
    assert fast.plan == interleaved.plan
    assert fast.report().programs == ()
    assert [p.name for p in fast.report().phases if p.name == "measure"] == []
    assert_same_cache(*run_both(fast, steps=1))


@pytest.mark.long
def test_a_plan_of_another_device_is_measured_again(interleaved):
    foreign = dataclasses.replace(interleaved.plan, device_kind="NVIDIA H200")
    with pytest.warns(PbjaxWarning, match="device_kind 'NVIDIA H200' in the plan, 'cpu' here;"):
        fast = on_hopper(plan=foreign)
    assert "measured again" in str(fast.report())
    assert {p.name for p in fast.report().programs} == {"unsplit", "sequential", "interleaved"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"staggers": (0, 1)}, r"staggers \(0, 1\)"),
        ({"sm_budgets": {"TENSOR": 84}}, r"sm_budgets \{'TENSOR': 84\}"),
        ({"unroll": 2}, "unroll 2"),
        ({"compiler_options": {"a": True}}, r"compiler_options \{'a': True\}"),
    ],
    ids=str,
)
def test_a_plan_of_what_a_step_cannot_do_is_refused(interleaved, change, found):
    plan = dataclasses.replace(interleaved.plan, **change)
    with pytest.raises(
        InputError, match=f"the plan has {found}; interleaved sub-batches have none"
    ):
        on_hopper(plan=plan)


def test_what_is_predicted_to_be_much_slower_is_not_compiled(monkeypatch):
    monkeypatch.setattr("pbjax.decode.search.HOPELESS", 0.0)
    fast = on_hopper()
    assert fast.plan.decision == "unsplit"
    assert "not tried" in fast.plan.reason
    assert fast.plan.sizes == (B,)


def test_a_state_of_which_three_copies_do_not_fit_is_refused():
    small = dataclasses.replace(find_device("cpu", num_cores=2), memory_bytes=10_000)
    with pytest.raises(InputError, match="three states beside the weights"):
        pbjax.optimize(step, *example(), state=1, device=small)


def counting(x, state):
    cache, count = state
    out = step(x, cache)
    return out.hidden, (out.cache, count + 1)


@pytest.fixture(scope="module")
def interleaved_counting():
    x, cache = example()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "targets_hopper", lambda: True)
        patch.setattr("pbjax.tuning.autotune.NOISE_FACTOR", -1e9)
        patch.setattr("pbjax.decode.search.HOPELESS", float("inf"))
        axes = (0, (0, None))
        return pbjax.optimize(counting, x, (cache, jnp.int32(0)), state=1, batch_axes=axes)


@pytest.mark.long
def test_each_sub_batch_carries_its_own_copy_of_what_all_rows_share(interleaved_counting):
    x, cache = example()
    held = interleaved_counting.hold((cache, jnp.int32(0)))
    for _ in range(2):
        _, held = interleaved_counting(x, held)
    got, count = interleaved_counting.release(held)
    assert count == 2
    assert_same_cache(got, step(x, step(x, cache).cache).cache)


def test_an_array_may_be_in_the_state_twice(unsplit):
    x, cache = example()
    keys = cache.layers[0][0]
    twice = Cache([(keys, keys), *cache.layers[1:]], cache.lengths)
    expected = step(x, twice).cache
    out = unsplit(x, unsplit.hold(twice))
    assert_same_cache(unsplit.release(out.cache), expected)


@pytest.mark.parametrize("batch_size", [B // 2, 2 * B])
def test_a_state_of_another_batch_is_refused(interleaved, batch_size):
    with pytest.raises(InputError, match=r"hold: leaf 0 is .* was planned for"):
        interleaved.hold(example(batch_size)[1])


def test_a_call_that_is_refused_leaves_the_state_as_it_was(interleaved):
    x, cache = example()
    held = interleaved.hold(cache)
    with pytest.raises(InputError, match=r"step: input 0 is bfloat16\[4, "):
        interleaved(x[:4], held)
    with pytest.raises(InputTypeError, match="beside the state"):
        interleaved({"x": x}, held)
    got, want = interleaved(x, held).hidden, step(x, cache).hidden.astype(jnp.float32)
    assert_close(got, want, reduction=F, roundings=8 * LAYERS)


def test_only_a_held_state_is_released(unsplit):
    with pytest.raises(InputTypeError, match="release: a Cache; a held state"):
        unsplit.release(example()[1])


def test_a_state_without_an_array_is_refused():
    with pytest.raises(InputError, match="without an array"):
        pbjax.optimize(lambda x, state: (x + 1, state), example()[0], None, state=1)


def test_an_input_of_another_device_is_moved_and_the_state_is_kept(unsplit):
    x, cache = example()
    expected = unsplit(x, unsplit.hold(jax.tree.map(jnp.copy, cache))).hidden
    held = unsplit.hold(jax.tree.map(jnp.copy, cache))
    found = unsplit(jax.device_put(x, jax.devices()[1]), held)
    assert (found.hidden == expected).all()
    unsplit(x, found.cache)


def test_a_state_that_comes_back_with_its_batch_elsewhere_is_refused():
    square = jnp.ones((4, 4))
    with pytest.raises(InputError, match=r"axes \(0,\) of its leaves, and in \(1,\)"):
        pbjax.optimize(lambda x, s: (x[:, 0] + 1, s.T), square, square * 2, state=1)


def test_shapes_in_place_of_arrays_are_refused():
    x, cache = example()
    shapes = jax.eval_shape(lambda: cache)
    with pytest.raises(InputTypeError, match=r"an input is the shape .*; arrays are needed"):
        pbjax.optimize(step, x, shapes, state=1)


def test_report_says_what_memory_the_step_needs():
    x, cache = example()
    report = pbjax.optimize(step, x, cache, state=1).report()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((x, cache)))
    assert f"state: {report.state.state_bytes / 1e6:,.1f} MB" in str(report)
    assert all(program.needed_bytes >= held for program in report.programs)


@pytest.mark.parametrize("batch_size", long_but([2, 1]))
def test_a_batch_too_small_to_split_runs_unsplit(batch_size):
    x, cache = example(batch_size)
    fast = pbjax.optimize(step, x, cache, state=1)
    expected = step(x, cache).cache
    assert fast.plan.decision == "unsplit"
    assert fast.plan.reason == f"a batch of {batch_size} rows is too small to split"
    assert_same_cache(fast.release(fast(x, fast.hold(cache)).cache), expected)


def layout_of(leaves, axes, sizes):
    return StateLayout(
        argument=0,
        tree=jax.tree.structure(leaves),
        inputs=range(len(leaves)),
        outputs=range(len(leaves)),
        axes=axes,
        sizes=sizes,
        signature=tuple((x.shape, x.dtype) for x in leaves),
        others=jax.tree.structure(()),
    )


def timed(sizes, *seconds):
    spec = ProgramSpec(sizes=sizes, staggers=(0,) * len(sizes), interleaved=len(sizes) > 1)
    program = CompiledProgram(
        spec=spec,
        program=lambda: None,
        weights=(),
        temporary_bytes=0,
        weight_bytes=0,
        needed_bytes=0,
        compile_s=0.0,
        key="",
    )
    return TimedProgram(program=program, seconds=seconds)


# Seconds rise from round to round as the device grows warm; what is compared is each round.
@pytest.mark.parametrize(
    ("interleaved_s", "kept", "reason"),
    [
        ((0.9, 1.9, 2.9, 3.9), "interleaved", "1.042x"),
        ((0.9, 1.8, 3.1, 3.8), "unsplit", "inside the noise"),
        ((1.1, 2.1, 3.1, 4.1), "unsplit", "slower"),
    ],
)
def test_a_gain_is_that_of_each_round(interleaved_s, kept, reason):
    found = [timed((4,), 1.0, 2.0, 3.0, 4.0), timed((2, 2), *interleaved_s)]
    programs = [each.program for each in found]
    specs = [program.spec for program in programs]
    shortlist = Shortlist(batch_size=4, wholes=(specs[0],), splits=(specs[1],))
    verdict = _decide(shortlist, programs, found)
    assert verdict.kept.spec.name == kept
    assert reason in verdict.reason


def test_what_is_only_compared_is_not_kept():
    """A plan of a step has no word for sub-batches one after the other."""
    found = [timed((4,), 1.0, 1.0), timed((2, 2), 1.2, 1.2), timed((2, 2), 0.5, 0.5)]
    sequential = dataclasses.replace(found[2].spec, interleaved=False)
    program = dataclasses.replace(found[2].program, spec=sequential)
    found[2] = dataclasses.replace(found[2], program=program)
    whole, interleaved, _ = (each.spec for each in found)
    shortlist = Shortlist(
        batch_size=4, wholes=(whole,), splits=(interleaved,), compared=(sequential,)
    )
    verdict = _decide(shortlist, [each.program for each in found], found)
    assert (verdict.kept.spec, verdict.split.spec) == (whole, interleaved)
    assert "interleaved 2+2 takes 1,200 ms" in verdict.reason


@pytest.mark.parametrize("sizes", [(5,), (3, 2)])
def test_cut_and_joined_a_state_is_itself(sizes):
    leaves = [jnp.arange(10).reshape(5, 2), jnp.arange(15).reshape(3, 5), jnp.arange(4)]
    layout = layout_of(leaves, (0, 1, None), sizes)
    for got, want in zip(layout.join(layout.cut(leaves)), leaves, strict=True):
        assert (got == want).all()
