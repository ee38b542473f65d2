"""Models that mix their batch: taken apart at the whole batch, fused, and run as they are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from pallas_kernels.testing import assert_close
from pbjax.batch_axes.propagation import SplitError
from pbjax.device import find_device
from pbjax.errors import ModelError
from pbjax.program.analysis import analyse, whole_batch
from pbjax.program.stages import graph_fingerprint
from pbjax.program.traced_model import outgrowing
from tests.batch_axes.test_random import PROGRAMS, run
from tests.row_truth import BATCH, KEY, D, T, weight

DEVICE = find_device("cpu", num_cores=2)
WIDTH, LAYERS = 16, 2
UP, SCALE = jnp.asarray(weight(WIDTH, WIDTH, seed=21)), jnp.asarray(weight(WIDTH, seed=22))
X = jnp.asarray(weight(BATCH, WIDTH, seed=23))


def encoder(x):
    for _ in range(LAYERS):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * SCALE[None]
        x = x + jax.nn.gelu(normed @ UP + SCALE[None])
    return x


def clip_logits(x, y):
    return encoder(x) @ encoder(y).T


def sorted_experts(x, key):
    ids = jnp.argmax(x @ UP + jax.random.normal(key, x.shape), -1) % 2
    order = jnp.argsort(ids)
    y = lax.ragged_dot(x[order], jnp.stack([UP] * 2), jnp.bincount(ids, length=2))
    return y[jnp.argsort(order)]


def batch_mean_loss(x):
    return jnp.mean(jnp.square(encoder(x)))


def fixed_batch(x):
    """Repeats weights along the batch, and makes a product of weights alone."""
    rows = jnp.broadcast_to(SCALE, (BATCH, WIDTH))
    return encoder(x.reshape(BATCH, WIDTH) + rows) @ (UP * SCALE[:, None])


MODELS = {
    "clip": (clip_logits, (X, X + 1), "dot_general"),
    "experts": (sorted_experts, (X, KEY), "random_bits"),
    "loss": (batch_mean_loss, (X,), "reduce_sum"),
    "fixed": (fixed_batch, (X,), "fixed_batch raises at batch size 2"),
}


def taken_apart(name, fuse="none", rows=BATCH):
    model, inputs, _ = MODELS[name]
    inputs = tuple(x if x is KEY else x[:rows] for x in inputs)
    axes = tuple(None if x is KEY else 0 for x in inputs)
    return analyse(model, inputs, device=DEVICE, batch_axes=axes, fuse=fuse), inputs


def outputs(found, inputs):
    fast = jax.jit(
        whole_batch(found, plain=False), compiler_options={"xla_backend_optimization_level": 0}
    )
    return fast(found.weights, jax.tree.leaves(inputs))


@pytest.mark.parametrize("fuse", ["none", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_model_runs_as_it_is_and_says_why_it_is_not_split(name, fuse):
    model, _, operation = MODELS[name]
    found, inputs = taken_apart(name, fuse)
    where = r"\(test_unsplittable.py:\d+\)"
    assert re.match(rf"{operation}.*{where}", found.unsplittable)
    assert found.fused == (fuse == "all")
    (got,) = outputs(found, inputs)
    assert_close(got, model(*inputs), reduction=WIDTH * BATCH, roundings=8 * LAYERS)


@pytest.mark.parametrize("name", MODELS)
def test_all_that_a_report_says_is_there(name):
    found, _ = taken_apart(name)
    assert found.graph.avals[found.graph.inputs[0]].shape == (BATCH, WIDTH)
    assert len(found.labels) == len(found.graph.operations)
    assert found.fingerprint == graph_fingerprint(found.graph)
    assert found.out_axes == (None,)
    assert found.summary.num_blocks == found.program.block.count
    assert max(stage.bytes_per_row for stage in found.summary.stages) >= 2 * 4 * WIDTH
    assert any(stage.weight_bytes for stage in found.summary.stages)


@pytest.mark.parametrize("name", MODELS)
def test_what_needs_a_split_is_refused_with_the_reason(name):
    found, _ = taken_apart(name)
    reason = re.escape(found.unsplittable)
    for asked in (
        lambda: found.require_split("optimize(split=(3, 3))"),
        lambda: found.program_at(BATCH // 2),
        lambda: found.traced_at(BATCH // 2),
    ):
        with pytest.raises(SplitError, match=f": {reason}; .*; ") as raised:
            asked()
        assert isinstance(raised.value, ModelError)
    assert found.traced_at(BATCH) is found.traced


def test_model_that_can_be_split_is_asked_in_vain():
    found = analyse(encoder, (X,), device=DEVICE)
    found.require_split("optimize(split=(3, 3))")
    assert (found.unsplittable, found.split_error) == ("", None)
    assert found.traced_at(BATCH // 2).graph.avals[found.graph.inputs[0]].shape[0] == BATCH // 2


@pytest.mark.parametrize("rows", [1, 2])
def test_smallest_batches_are_taken_apart_at_their_own_size(rows):
    found, inputs = taken_apart("clip", "all", rows)
    assert found.graph.avals[found.graph.inputs[0]].shape == (rows, WIDTH)
    (got,) = outputs(found, inputs)
    assert_close(got, clip_logits(*inputs), reduction=WIDTH * BATCH, roundings=8 * LAYERS)


def test_kernels_are_verified_at_few_rows():
    found, _ = taken_apart("clip", "all")
    assert found.probe.graph.avals[found.probe.graph.inputs[0]].shape == (2, WIDTH)
    found.probe.verify()
    assert taken_apart("fixed", "all")[0].probe.graph.avals[0].shape[-1] == WIDTH


def test_weights_that_are_repeated_along_the_batch_are_not_prepared():
    graph = taken_apart("fixed")[0].graph
    kept = outgrowing(graph)
    shapes = {graph.avals[value].shape for value in kept}
    assert (BATCH, WIDTH) in shapes
    (product,) = (o for o in graph.operations if o.primitive == "mul" and _only_weights(graph, o))
    assert kept.isdisjoint(product.outputs)


def _only_weights(graph, operation):
    shape = graph.avals[operation.outputs[0]].shape
    return shape == (WIDTH, WIDTH)


def test_state_that_changes_is_refused_still():
    def prints(x):
        jax.debug.print("{}", x)
        return clip_logits(x, x)

    where = r"debug_print|debug_callback"
    with pytest.raises(ModelError, match=rf"({where}) \(test_unsplittable.py:\d+\) has side"):
        analyse(prints, (X,), device=DEVICE)


def test_model_that_asserts_its_batch_is_not_split():
    def checked(x):
        assert len(x) == BATCH
        return encoder(x)

    found = analyse(checked, (X,), device=DEVICE)
    assert re.match(
        r"checked raises at batch size 2 \(test_unsplittable.py:\d+\): .", found.unsplittable
    )


@settings(max_examples=12)
@given(PROGRAMS)
def test_random_program_is_split_or_says_why_not_and_computes_the_same(program):
    x = weight(BATCH, T, D, seed=11)
    want, mixed = run(program, x.astype(np.float64), np)

    def model(x):
        return jnp.tanh(run(program, x, jnp)[0])

    found = analyse(model, (x,), device=DEVICE)
    if found.unsplittable:
        assert mixed
        assert re.search(r"\(test_\w+.py:\d+\)", found.unsplittable)
        assert "\n" not in found.unsplittable
    (got,) = outputs(found, x)
    np.testing.assert_allclose(got, np.tanh(want), rtol=1e-3, atol=1e-3)
