"""Cutting a graph into stages: complete, in order, the same at every batch size."""

from contextlib import ExitStack
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pbjax.device import ResourceClass, find_device
from pbjax.graph.trace import trace
from pbjax.program.analysis import analyse
from pbjax.program.stages import _names, graph_fingerprint
from tests.networks import NETWORKS, D, normal, tokens

DEVICE = find_device("cpu", num_cores=2)
SQUARE, WIDE = normal(1, D, D), normal(1, D, D + 1)


def analysed(network, batch_size):
    return analyse(
        network.model,
        network.inputs(batch_size),
        device=DEVICE,
        variables=network.variables,
        batch_axes=network.batch_axes,
    )


@pytest.fixture(scope="module", params=NETWORKS)
def analysis(request):
    return analysed(NETWORKS[request.param](3), 6)


def test_stages_hold_every_operation_of_the_block_once_and_in_order(analysis):
    program = analysis.program_at(6)
    operations = [o for stage in program.stages for o in stage.operations]
    assert operations == list(program.block.operations)
    assert all(stage.operations for stage in program.stages)


def test_ends_and_blocks_hold_every_operation_of_the_graph(analysis):
    program = analysis.program_at(6)
    ends = sum(len(s.operations) for s in (program.prologue, program.epilogue) if s)
    inside = 1 if analysis.scanned else program.block.count * len(program.block.operations)
    assert ends + inside == len(program.graph.operations)


def test_stage_reads_only_what_is_there(analysis):
    program = analysis.program_at(6)
    block = program.block
    there = {link.inner for link in (*block.consts, *block.carry, *block.xs)}
    for index, stage in enumerate(program.stages):
        assert set(stage.reads) <= there
        assert not set(stage.writes) & there
        there |= set(stage.writes)
        carried = set(program.live(index + 1)) - {c.inner for c in block.carry}
        assert carried <= there


def test_there_are_as_many_stages_as_sub_batches_may_be(analysis):
    assert len(analysis.summary.block) >= 3


def test_names_are_unique(analysis):
    names = [stage.name for stage in analysis.program_at(6).stages]
    assert len(set(names)) == len(names)
    assert all(names)


def operations(*parts):
    """Operations of (scope, width): a product of that width, or for 0 elementwise ones."""

    def function(_, x):
        for scopes, width in parts:
            with ExitStack() as stack:
                for scope in scopes.split("/"):
                    stack.enter_context(jax.named_scope(scope))
                x = x @ jnp.ones((x.shape[1], width)) if width else jnp.tanh(x + 1) * 2 - x
        return x

    return trace(function, (), jnp.ones((4, 8))).operations


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        # Many operations in front of one product.
        ((("net/norm", 0), ("net/dense", 512)), "dense"),
        ((("net/mlp/norm", 0), ("net/mlp/up", 512), ("net/mlp/down", 8)), "mlp"),
        # The end of one module and all of another.
        ((("net/attention/out", 8), ("net/mlp/up", 512), ("net/mlp/down", 8)), "mlp"),
        # Nothing but what all stages are in has half of it: the largest.
        ((("net/a", 400), ("net/b", 9), ("net/c", 300)), "b"),
        ((("net/norm", 0),), "norm"),
    ],
)
def test_a_stage_is_called_after_the_module_that_has_most_of_its_work(parts, name):
    pieces = operations(*parts), operations(("net/other", 8))
    assert _names(pieces, (ResourceClass.TENSOR,) * 2) == (name, "other")


def test_cutting_does_not_depend_on_the_batch_size(analysis):
    first, second = analysis.program_at(2), analysis.program_at(7)
    for a, b in zip(first.stages, second.stages, strict=True):
        assert (a.name, a.resource, a.reads, a.writes) == (b.name, b.resource, b.reads, b.writes)
    assert graph_fingerprint(first.graph) == analysis.fingerprint


@pytest.mark.parametrize("name", ["nnx_scan", "function_loop", "two_axes"])
def test_fingerprints_do_not_depend_on_the_batch_size(name):
    few, many = analysed(NETWORKS[name](3), 4), analysed(NETWORKS[name](3), 9)
    assert few.fingerprint == many.fingerprint
    assert [s.fingerprint for s in few.summary.stages] == [
        s.fingerprint for s in many.summary.stages
    ]


def test_fingerprint_does_not_depend_on_weights():
    def model(seed):
        w = normal(seed, D, D)
        return lambda x: jnp.tanh(x @ w)

    prints = {analyse(model(seed), tokens(4), device=DEVICE).fingerprint for seed in (1, 2)}
    assert len(prints) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: jnp.sin(x @ SQUARE),
        lambda x: jnp.tanh(x @ WIDE),
        lambda x: jnp.tanh(x @ SQUARE) * 2.0,
        lambda x: jnp.tanh(x @ SQUARE).astype(jnp.bfloat16),
        lambda x: jnp.tanh(jnp.tanh(x @ SQUARE)),
    ],
)
def test_fingerprint_depends_on_the_operations(other):
    base = analyse(lambda x: jnp.tanh(x @ SQUARE), tokens(4), device=DEVICE)
    assert analyse(other, tokens(4), device=DEVICE).fingerprint != base.fingerprint


def test_number_of_layers_changes_the_model_and_not_its_stages():
    two, many = analysed(NETWORKS["function_loop"](2), 4), analysed(NETWORKS["function_loop"](9), 4)
    assert two.fingerprint != many.fingerprint
    assert two.summary.stages == many.summary.stages
    assert (two.summary.num_blocks, many.summary.num_blocks) == (2, 9)


def test_stage_figures_are_those_of_one_row():
    few, many = analysed(NETWORKS["function_loop"](2), 4), analysed(NETWORKS["function_loop"](2), 8)
    for a, b in zip(few.summary.stages, many.summary.stages, strict=True):
        assert a == replace(b, flops_per_row=a.flops_per_row)
        assert a.flops_per_row == pytest.approx(b.flops_per_row)


def test_scopes_of_the_model_name_its_stages():
    weights = [(normal(i, D, 4 * D), normal(i, 4 * D, D)) for i in range(3)]

    def model(x):
        for up, down in weights:
            with jax.named_scope("layer"):
                with jax.named_scope("mix"):
                    y = jnp.exp(jnp.sin(x))
                with jax.named_scope("mlp"):
                    x = x + jnp.tanh(y @ up) @ down
        return x

    names = {s.name.split(".")[0] for s in analyse(model, tokens(64), device=DEVICE).summary.block}
    assert names <= {"mix", "mlp"}
    assert "mlp" in names


def test_every_stage_computes_something_where_there_is_enough():
    weight = normal(1, D, D)

    def network(x):
        for _ in range(3):
            y = x.reshape(-1, D) @ weight @ weight @ weight
            x = jnp.tanh(y).reshape(x.shape)
        return x

    analysis = analyse(network, (jnp.ones((6, 4, D)),), device=find_device("NVIDIA H200"))
    for stage in analysis.program_at(6).stages:
        assert "dot_general" in {operation.primitive for operation in stage.operations}
