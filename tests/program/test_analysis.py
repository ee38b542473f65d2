"""Taking a model apart: where the batch is, what is refused, what is traced once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pbjax.batch_axes.inputs import find_batch
from pbjax.device import find_device
from pbjax.errors import InputError, InputTypeError, ModelError
from pbjax.program.analysis import analyse
from tests.networks import NETWORKS, D, T, normal, tokens

DEVICE = find_device("cpu", num_cores=2)
W = normal(1, D, D)


def refused(kind, call):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert message.count(";") >= 2
    return message


def test_batch_is_read_off_every_input():
    inputs = {"a": jnp.zeros((4, 2)), "b": jnp.zeros((4,))}, jnp.zeros((3, 4)), jnp.zeros(())
    found = find_batch(inputs, (0, 1, None))
    assert found.batch_size == 4
    assert found.axes == (0, 0, 1, None)


def test_axes_may_be_a_tree():
    inputs = ({"a": jnp.zeros((4, 2)), "b": jnp.zeros((2, 4)), "c": jnp.zeros(3)},)
    found = find_batch(inputs, ({"a": 0, "b": 1, "c": None},))
    assert found.axes == (0, 1, None)
    assert found.batch_size == 4


@pytest.mark.parametrize("axes", [0, (0, 0, 0), (0, None, 0), ({"a": 0, "b": None}, 0, 0)])
def test_input_that_is_none_has_no_axis(axes):
    found = find_batch(({"a": jnp.zeros((4, 2)), "b": None}, None, jnp.zeros(4)), axes)
    assert found.axes == (0, 0)
    assert found.batch_size == 4


def test_shapes_are_enough():
    assert find_batch((jax.ShapeDtypeStruct((5, 2), jnp.float32),), 0).batch_size == 5


@pytest.mark.parametrize(
    ("inputs", "axes"),
    [
        ((), 0),
        ((jnp.zeros((4, 2)), jnp.zeros((3, 2))), 0),
        ((jnp.zeros((0, 2)),), 0),
        ((jnp.zeros(()),), 0),
        ((jnp.zeros((4, 2)),), 2),
        ((jnp.zeros((4, 2)),), -1),
        ((jnp.zeros((4, 2)),), 0.0),
        ((jnp.zeros((4, 2)),), None),
        ((jnp.zeros((4, 2)),), (0, 0)),
        ((jnp.zeros((4, 2)),), ({"a": 0},)),
        (({"a": jnp.zeros((4, 2))},), ({"b": 0},)),
        (({},), 0),
    ],
)
def test_inputs_without_one_batch_are_refused(inputs, axes):
    refused(InputError, lambda: find_batch(inputs, axes))


@pytest.mark.parametrize("leaf", [3.0, "text", [1.0, 2.0]])
def test_input_that_is_no_array_is_refused(leaf):
    assert "inputs[1]" in refused(InputTypeError, lambda: find_batch((jnp.zeros((4, 2)), leaf), 0))


def test_unequal_rows_are_named():
    inputs = ({"ids": jnp.zeros((4, 2)), "mask": jnp.zeros((3, 2))},)
    message = refused(InputError, lambda: find_batch(inputs, 0))
    assert "inputs[0]['ids'] has 4 rows, inputs[0]['mask'] has 3 rows" in message


def test_output_axes_are_found():
    network = NETWORKS["two_axes"](2)
    axes = network.batch_axes
    found = analyse(network.model, network.inputs(4), device=DEVICE, batch_axes=axes)
    assert found.out_axes == (1, 1)


def test_output_without_rows_has_no_axis():
    network = NETWORKS["function_scan"](2)
    found = analyse(network.model, network.inputs(4), device=DEVICE)
    assert found.out_axes == (0, 0, None)


def test_program_is_traced_once_for_each_size():
    traced = []

    def model(x):
        traced.append(x.shape[0])
        return jnp.tanh(x @ W)

    found = analyse(model, tokens(6), device=DEVICE)
    del traced[:]
    assert found.program_at(4) is found.program_at(4)
    assert traced == [4]


def whole(model, *inputs):
    """The analysis of a model whose batch cannot be split, and what is said of it."""
    found = analyse(model, inputs, device=DEVICE)
    assert found.unsplittable
    assert "\n" not in found.unsplittable
    message = refused(ModelError, lambda: found.require_split("optimize(split=(3, 3))"))
    assert message.startswith(f"optimize(split=(3, 3)): {found.unsplittable}; ")
    return found, found.unsplittable


def test_model_that_computes_with_its_batch_size_is_not_split():
    def model(x):
        return jnp.tanh(x @ W) / x.shape[0]

    assert "batch size" in whole(model, *tokens(6))[1]


def test_model_with_other_operations_for_other_sizes_is_not_split():
    def model(x):
        return jnp.tanh(x @ W) if x.shape[0] > 2 else x @ W

    assert "at batch size 2 model computes something else" in whole(model, *tokens(6))[1]


def test_model_of_one_size_only_is_not_split():
    def model(x):
        return x.reshape(6, T * D) @ jnp.ones((T * D, 2))

    found, reason = whole(model, *tokens(6))
    assert re.search(r"model raises at batch size 2 \(test_analysis.py:\d+\): .*reshape", reason)
    assert found.graph.avals[found.graph.outputs[0]].shape == (6, 2)


def test_model_that_branches_on_values_is_refused():
    def model(x):
        return x @ W if x.sum() > 0 else x

    assert "raises at batch size" in refused(
        ModelError, lambda: analyse(model, tokens(6), device=DEVICE)
    )


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + x.sum(axis=0, keepdims=True),
        lambda x: jax.nn.softmax(x, axis=0),
        lambda x: jnp.roll(x, 1, axis=0),
        lambda x: jnp.concatenate([x[1:], x[:1]]),
        lambda x: x[jnp.argsort(x[:, 0, 0])],
        lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0] * 0, x)[1],
        lambda x: x / jnp.linalg.norm(x),
        lambda x: x * (jnp.max(x) > 0),
        lambda x: x * jnp.arange(x.shape[0]).reshape(-1, 1, 1),
    ],
)
def test_model_that_mixes_its_rows_is_not_split(mix):
    found, reason = whole(lambda x: mix(jnp.tanh(x @ W)), *tokens(6))
    assert re.search(r"\(test_analysis.py:\d+\)", reason)
    assert [o.primitive for o in found.graph.operations][:2] == ["dot_general", "tanh"]


def test_mixing_in_a_scanned_layer_is_named():
    weights = jnp.stack([W] * 3)

    def model(x):
        def layer(x, w):
            return jnp.tanh(x @ w) - x.mean(axis=0, keepdims=True), None

        return jax.lax.scan(layer, x, weights)[0]

    found, reason = whole(model, *tokens(6))
    assert re.match(r"reduce_sum \(test_analysis.py:\d+\) reduces over axis 0, the batch", reason)
    assert found.scanned
    assert found.program.block.count == 3


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint64])
def test_64_bit_inputs_of_numpy_are_read_as_jax_reads_them(dtype):
    found = analyse(lambda x: x * 2, (np.ones((4, 3), dtype),), device=DEVICE)
    assert found.graph.avals[found.graph.inputs[0]].dtype.itemsize == 4


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_smallest_batches_are_taken_apart_alike(batch_size):
    base = analyse(lambda x: jnp.tanh(x @ W), tokens(8), device=DEVICE)
    found = analyse(lambda x: jnp.tanh(x @ W), tokens(batch_size), device=DEVICE)
    assert found.fingerprint == base.fingerprint
    assert found.batch.batch_size == batch_size
    assert [s.name for s in found.summary.stages] == [s.name for s in base.summary.stages]
