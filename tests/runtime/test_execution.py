"""The split program computes what the unsplit one computes, whatever the split."""

import jax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.testing import assert_close
from pbjax.device import find_device
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import analyse
from pbjax.runtime.execution import SplitProgram, WeightLayout
from tests.cases import examples
from tests.networks import NETWORKS

DEVICE = find_device("cpu", num_cores=2)


@st.composite
def cases(draw):
    num_layers = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    staggers = draw(st.lists(st.integers(0, 99), min_size=len(sizes), max_size=len(sizes)))
    return num_layers, tuple(sizes), tuple(staggers), draw(st.integers(1, 3))


def split_program(analysis, sizes, staggers, unroll=1):
    programs = tuple(analysis.program_at(measured_size(size)) for size in sizes)
    num_stages = len(analysis.summary.block)
    return SplitProgram(
        programs=programs,
        sizes=sizes,
        timetable=timetable(analysis.summary, tuple(o % num_stages for o in staggers)),
        layout=WeightLayout.of(programs[0]),
        in_axes=analysis.batch.axes,
        out_axes=analysis.out_axes,
        unroll=unroll,
    )


def analysed(network, batch_size):
    inputs = network.inputs(batch_size)
    analysis = analyse(
        network.model,
        inputs,
        device=DEVICE,
        variables=network.variables,
        batch_axes=network.batch_axes,
    )
    return analysis, inputs


def run_split(analysis, inputs, sizes, staggers, unroll=1):
    program = split_program(analysis, sizes, staggers, unroll)
    weights = program.layout.pack(analysis.weights)
    outputs = jax.jit(program.__call__)(weights, jax.tree.leaves(inputs))
    return jax.tree.unflatten(analysis.graph.out_tree, outputs)


def assert_same(split, unsplit):
    assert jax.tree.structure(split) == jax.tree.structure(unsplit)
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(unsplit), strict=True):
        assert_close(a, b, reduction=12, roundings=20)


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=examples(4), derandomize=True, phases=[Phase.generate])
@given(case=cases())
def test_any_split_equals_the_unsplit_program(name, case):
    num_layers, sizes, staggers, unroll = case
    network = NETWORKS[name](num_layers)
    analysis, inputs = analysed(network, sum(sizes))
    split = run_split(analysis, inputs, sizes, staggers, unroll)
    assert_same(split, network.direct(*inputs))


def test_layer_weights_are_stacked_once_and_passed_once():
    analysis, _ = analysed(NETWORKS["nnx_loop"](4), 6)
    layout = WeightLayout.of(analysis.program_at(6))
    packed = layout.pack(analysis.weights)
    assert sum(w.size for w in packed) == sum(w.size for w in analysis.weights)
    assert {w.shape[0] for w in packed[len(layout.loose) :]} == {4}


def test_weights_of_a_scan_are_passed_as_they_are():
    analysis, _ = analysed(NETWORKS["nnx_scan"](4), 6)
    packed = WeightLayout.of(analysis.program_at(6)).pack(analysis.weights)
    assert {id(w) for w in packed} == {id(w) for w in analysis.weights}


def test_sub_batches_do_not_depend_on_each_other():
    analysis, inputs = analysed(NETWORKS["nnx_loop"](3), 6)
    whole = run_split(analysis, inputs, (2, 2, 2), (0, 1, 2))
    (x,) = inputs
    other = run_split(analysis, (x.at[4:].set(9.0),), (2, 2, 2), (0, 1, 2))
    assert_close(other[:4], whole[:4], reduction=12)
    assert abs(other[4:] - whole[4:]).max() > 0.1


def test_loop_has_one_step_for_each_block_but_the_last():
    analysis, inputs = analysed(NETWORKS["nnx_loop"](5), 6)
    program = split_program(analysis, (3, 3), (0, 1))
    weights = program.layout.pack(analysis.weights)
    text = str(jax.make_jaxpr(program.__call__)(weights, jax.tree.leaves(inputs)))
    assert text.count("scan[") == 1
    assert "length=4" in text
