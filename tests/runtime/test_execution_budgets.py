"""SM budgets of a split program: which kernels get them, and that they change no value."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.attention import attention
from pallas_kernels.depthwise import depthwise_convolution
from pallas_kernels.dispatch import default_sm_budget
from pallas_kernels.gemm import gated_gemm, gemm
from pallas_kernels.norm import add_layer_norm, layer_norm, quantized_layer_norm, rms_norm
from pallas_kernels.operation import PRIMITIVE
from pallas_kernels.relaunch import can_relaunch, relaunch
from pallas_kernels.testing import assert_close
from pbjax.device import find_device
from pbjax.graph.trace import trace
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import analyse
from pbjax.runtime.execution import SplitProgram, WeightLayout
from tests.cases import long_but
from tests.kernel_decoder import H200, LAYERS, B, F, decode_step, inputs, normal

# Memory so fast that small products are bound by the Tensor Cores.
DEVICE = replace(find_device("NVIDIA H200"), memory_bytes_per_s=2e14)
BUDGETS = {"TENSOR": 84, "MEMORY": 48}


@pytest.fixture(scope="module")
def analysis():
    with use_abstract_mesh(H200):
        return analyse(decode_step, inputs(B), device=DEVICE)


@pytest.fixture(scope="module")
def unsplit():
    """The arrays that the model returns, called as it is."""
    return jax.tree.leaves(decode_step(*inputs(B)))


def split_program(analysis, sizes, staggers, sm_budgets):
    with use_abstract_mesh(H200):
        programs = tuple(analysis.program_at(measured_size(size)) for size in sizes)
    return SplitProgram(
        programs=programs,
        sizes=sizes,
        timetable=timetable(analysis.summary, staggers),
        layout=WeightLayout.of(programs[0]),
        in_axes=analysis.batch.axes,
        out_axes=analysis.out_axes,
        sm_budgets=sm_budgets,
    )


def traced(analysis, program):
    weights = program.layout.pack(analysis.weights)
    return jax.make_jaxpr(program.__call__)(weights, jax.tree.leaves(inputs(B)))


def launches(jaxpr):
    """(kernel, SMs) of every launch of a jaxpr, those in loops too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == PRIMITIVE:
            avals = [atom.aval for atom in equation.invars]
            text = str(jax.make_jaxpr(equation.params["kernel"])(*avals))
            found = re.findall(r"Mesh\(grid=\((\d+)(?:, 1)*,?\), .*kernel_name='(\w+)'", text)
            yield from ((name.removeprefix("pbjax_"), int(sms)) for sms, name in found)
        elif equation.primitive.name == "scan":
            yield from launches(equation.params["jaxpr"].jaxpr)


@pytest.mark.parametrize(
    "case", long_but([((9, 7), (2, 0)), ((16,), (0,)), ((8, 5, 3), (2, 1, 0))])
)
@pytest.mark.parametrize("sm_budgets", long_but([{}, BUDGETS, {"MEMORY": 1}], BUDGETS))
def test_split_programs_with_budgets_equal_the_unsplit_one(analysis, unsplit, case, sm_budgets):
    sizes, staggers = case
    program = split_program(analysis, sizes, staggers, sm_budgets)
    weights = program.layout.pack(analysis.weights)
    outputs = jax.jit(program.__call__)(weights, jax.tree.leaves(inputs(B)))
    for got, want in zip(outputs, unsplit, strict=True):
        assert_close(got, want.astype(jnp.float32), reduction=F, roundings=8 * LAYERS)


def test_budgets_hold_in_slots_of_several_classes_only(analysis):
    classes = [stage.resource for stage in analysis.summary.block]
    ahead = next(i for i, resource in enumerate(classes) if resource != classes[0])
    grids = {}
    for staggers in ((ahead, 0), (0, 0)):
        program = split_program(analysis, (8, 8), staggers, BUDGETS)
        grids[staggers] = set(launches(traced(analysis, program).jaxpr))
    assert ("add_rms_norm", BUDGETS["TENSOR"]) in grids[ahead, 0]
    assert ("add_rms_norm", 132) in grids[ahead, 0]
    # A head each, and all. Products of so few rows are XLA's.
    assert {sms for _, sms in grids[0, 0]} == {8, 132}


def operation(f, *args):
    """The one kernel operation of a function, and its operands when it is called with args."""
    with use_abstract_mesh(H200):
        graph = trace(f, (), *args)
    values = dict(zip(graph.inputs, jax.tree.leaves(args), strict=True))
    values |= dict(zip(graph.weights, map(jnp.asarray, graph.constants), strict=True))
    for found in graph.operations:
        operands = [values[a] if isinstance(a, int) else a.val for a in found.inputs]
        if found.primitive == PRIMITIVE:
            return found.params, operands
        results = found.equation.primitive.bind(*operands, **found.equation.params)
        results = results if found.equation.primitive.multiple_results else [results]
        values |= dict(zip(found.outputs, results, strict=True))
    raise AssertionError("no kernel")


X, W, GAIN = normal(1, 2, 8, 256), normal(2, 256, 128), jnp.ones(256, jnp.bfloat16)
Q, KV = normal(3, 2, 64, 4, 64), normal(4, 2, 64, 2, 64)
ROWS, KERNEL = normal(5, 128, 4, 64), normal(6, 7, 512)
RELAUNCHED = {
    "gemm": lambda _, x: gemm(x, W, bias=W[0], residual=x[..., :128], activation="gelu"),
    "gated_gemm": lambda _, x: gated_gemm(x, W, W, activation=None),
    "layer_norm": lambda _, x: layer_norm(x, GAIN, GAIN, eps=1e-5),
    "rms_norm": lambda _, x: rms_norm(x, GAIN, eps=1e-5),
    "add_layer_norm": lambda _, x: add_layer_norm(x, x + 1, GAIN, eps=1e-5),
    "attention": lambda _, x: attention(Q + x[0, 0, 0], KV, KV, causal=True, window=9),
    "relative attention": lambda _, x: attention(
        Q + x[0, 0, 0], KV, KV, relative_rows=ROWS, relative_shift=ROWS[0]
    ),
    "depthwise_convolution": lambda _, x: depthwise_convolution(
        jnp.tile(x, (1, 64, 2)), KERNEL, KERNEL[0], activation="silu"
    ),
}


@pytest.mark.parametrize("name", RELAUNCHED)
def test_a_kernel_launched_anew_gives_what_it_gave_under_the_new_budget(name):
    params, operands = operation(RELAUNCHED[name], X)
    assert can_relaunch(params)
    got = jax.jit(lambda *operands: relaunch(params, operands))(*operands)
    want = jax.jit(jax.extend.core.jaxpr_as_fun(params["plain"]))(*operands)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b.astype(jnp.float32), reduction=256)

    def launched(*operands):
        with use_abstract_mesh(H200), default_sm_budget(6):
            return relaunch(params, operands)

    assert {sms for _, sms in launches(jax.make_jaxpr(launched)(*operands).jaxpr)} <= {2, 3, 6}


def test_kernels_whose_arguments_are_not_the_public_ones_are_left_as_they_were():
    def quantised(_, x):
        return quantized_layer_norm(x, GAIN, dtype="int8", eps=1e-5)

    def mapped(_, x):
        return jax.vmap(lambda row: gemm(row, W))(x)

    assert not any(can_relaunch(operation(f, X)[0]) for f in (quantised, mapped))
