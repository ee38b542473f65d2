"""Kernels in the engine: one operation each, labelled, split, and equal to what they mean."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.attention import attention
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gemm
from pallas_kernels.norm import rms_norm
from pallas_kernels.operation import PRIMITIVE
from pallas_kernels.testing import assert_close
from pbjax.device import ResourceClass, find_device
from pbjax.graph.cost import equation_cost
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import analyse
from pbjax.runtime.execution import SplitProgram, WeightLayout
from tests.cases import long_but
from tests.kernel_decoder import H200, LAYERS, B, D, F, H, K, S, decode_step, inputs

DEVICE = find_device("NVIDIA H200")


@pytest.fixture(scope="module")
def analysis():
    with use_abstract_mesh(H200):
        return analyse(decode_step, inputs(B), device=DEVICE)


def test_every_kernel_is_one_operation_and_layers_are_found(analysis):
    names = Counter(o.params["name"] for o in analysis.graph.operations if o.primitive == PRIMITIVE)
    expected = {"rms_norm": 1, "gemm": 3, "decode_attention": 1, "add_rms_norm": 1, "gated_gemm": 1}
    assert names == {name: LAYERS * count for name, count in expected.items()}
    assert analysis.summary.num_blocks == LAYERS
    assert analysis.out_axes == (0,) * (1 + 2 * LAYERS)


def test_a_kernel_costs_the_arithmetic_it_means_and_the_bytes_of_its_operands(analysis):
    by_name = {
        o.params["name"]: equation_cost(o.equation)
        for o in analysis.graph.operations
        if o.primitive == PRIMITIVE
    }
    gated, cached = by_name["gated_gemm"], by_name["decode_attention"]
    assert gated.bytes == 2 * (B * D + 2 * D * F + B * F)
    assert gated.flops == pytest.approx(4 * B * D * F, rel=0.02)
    assert cached.bytes == 2 * (2 * B * D + 2 * B * S * K * H) + 4 * B


def test_decode_attention_and_norms_are_bound_by_memory_and_large_products_by_tensor_cores():
    def f(x, cache):
        rows = x.shape[0]
        y = gemm(x.reshape(-1, 1024), jnp.ones((1024, 4096), x.dtype))
        y = rms_norm(y, jnp.ones(4096, x.dtype), eps=1e-5)
        q = y.reshape(rows, -1, 32, 128)[:, :1]
        return decode_attention(q, cache, cache, jnp.full(rows, 1024))

    shapes = (64, 64, 1024), (64, 1024, 8, 128)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with use_abstract_mesh(H200):
        analysis = analyse(f, given, device=DEVICE)
    labels = zip(analysis.graph.operations, analysis.labels, strict=True)
    found = {o.params["name"]: label.resource for o, label in labels if o.primitive == PRIMITIVE}
    assert found == {
        "gemm": ResourceClass.TENSOR,
        "rms_norm": ResourceClass.MEMORY,
        "decode_attention": ResourceClass.MEMORY,
    }


@pytest.mark.parametrize(
    "case", long_but([((9, 7), (2, 0)), ((16,), (0,)), ((8, 5, 3), (2, 1, 0))])
)
def test_a_split_program_of_kernels_computes_what_the_unsplit_one_does(analysis, case):
    sizes, staggers = case
    with use_abstract_mesh(H200):
        programs = tuple(analysis.program_at(measured_size(size)) for size in sizes)
    stages = len(analysis.summary.block)
    program = SplitProgram(
        programs=programs,
        sizes=sizes,
        timetable=timetable(analysis.summary, tuple(s % stages for s in staggers)),
        layout=WeightLayout.of(programs[0]),
        in_axes=analysis.batch.axes,
        out_axes=analysis.out_axes,
    )
    given = inputs(B)
    outputs = jax.jit(program.__call__)(
        program.layout.pack(analysis.weights), jax.tree.leaves(given)
    )
    for got, want in zip(outputs, jax.tree.leaves(decode_step(*given)), strict=True):
        assert_close(got, want.astype(jnp.float32), reduction=F, roundings=8 * LAYERS)


def test_a_kernel_that_lets_rows_meet_is_not_split():
    def mixed(x):
        return attention(x[None], x[None], x[None])[0]

    x = jax.ShapeDtypeStruct((16, 4, 64), jnp.bfloat16)
    with use_abstract_mesh(H200):
        reason = analyse(mixed, (x,), device=DEVICE).unsplittable
    assert re.search(r"\(test_in_engine.py:\d+\)", reason)
