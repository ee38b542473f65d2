import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from pbjax.errors import ModelError
from pbjax.graph.difference import difference
from pbjax.graph.trace import (
    body_graph,
    describe,
    evaluate,
    loop_body,
    scan_parts,
    trace,
)

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
W = np.ones((3, 3), np.float32)


def traced(f, *inputs):
    return trace(lambda params, *args: f(*args), (), *inputs)


def primitives(graph):
    return [operation.primitive for operation in graph.operations]


def run(graph, weights, inputs):
    """Evaluates a graph on arrays, as every stage is evaluated."""
    env = dict(enumerate(map(jnp.asarray, [*weights, *graph.constants, *inputs])))
    evaluate(graph.operations, env)
    return [a.val if isinstance(a, Literal) else env[a] for a in graph.outputs]


def test_weights_come_first_then_captured_arrays_then_inputs():
    captured = jnp.ones((2, 3))
    graph = trace(lambda p, x: x @ p["w"] + p["b"] + captured, {"b": W[:1], "w": W}, X)
    assert graph.names == ("params['b']", "params['w']", "captured[0]", "inputs[0]")
    assert list(graph.weights) == [0, 1, 2]
    assert list(graph.inputs) == [3]
    assert [graph.avals[i].shape for i in range(4)] == [(1, 3), (3, 3), (2, 3), (2, 3)]


def test_operations_are_numbered_in_the_order_of_their_results():
    graph = traced(lambda x: jnp.sin(jnp.cos(x)), X)
    assert primitives(graph) == ["cos", "sin"]
    assert [operation.outputs for operation in graph.operations] == [(1,), (2,)]
    assert graph.outputs == (2,)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g,))


@pytest.mark.parametrize(
    "f",
    [
        jax.jit(jnp.sin),
        jax.jit(jax.jit(jnp.sin)),
        jax.checkpoint(jnp.sin),
        with_jvp,
        with_vjp,
        jax.jit(jax.checkpoint(lambda x: with_jvp(x))),
        jax.vmap(with_vjp),
        jax.named_call(jnp.sin, name="scope"),
    ],
)
def test_nested_call_is_inlined(f):
    graph = traced(lambda x: 2 * f(x), X)
    assert primitives(graph) == ["sin", "mul"]
    np.testing.assert_array_equal(run(graph, [], [X])[0], 2 * np.asarray(jnp.sin(X)))


def test_call_twice_gives_its_operations_twice():
    f = jax.jit(jnp.sin)
    assert primitives(traced(lambda x: f(f(x)), X)) == ["sin", "sin"]


def test_literal_passed_into_a_call_stays_a_literal():
    graph = traced(lambda x: jax.jit(lambda x, y: x * y)(x, np.float32(2)), X)
    assert isinstance(graph.operations[-1].inputs[1], Literal)
    np.testing.assert_array_equal(run(graph, [], [X])[0], 2 * X)


def test_array_captured_by_a_nested_call_becomes_a_weight():
    graph = traced(jax.jit(lambda x: x + jnp.asarray(X)), X)
    assert graph.num_weights == len(graph.constants)
    np.testing.assert_array_equal(run(graph, [], [X])[0], 2 * X)


@pytest.mark.parametrize(
    ("f", "primitive"),
    [
        (lambda x: lax.scan(lambda c, w: (c @ w, None), x, jnp.ones((2, 3, 3)))[0], "scan"),
        (lambda x: lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + 1, x), "while"),
        (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "cond"),
    ],
)
def test_loops_and_branches_stay_whole(f, primitive):
    graph = traced(f, X)
    assert primitives(graph).count(primitive) == 1
    np.testing.assert_allclose(run(graph, [], [X])[0], f(X))


def test_scopes_are_joined_through_calls():
    def f(x):
        with jax.named_scope("outer"):
            return jax.jit(jax.named_scope("inner")(jnp.sin))(x)

    (operation,) = traced(f, X).operations
    assert operation.scope == "outer/inner"


def test_scope_is_kept_when_operations_are_run_again():
    graph = traced(jax.named_scope("norm")(jnp.sin), X)
    again = traced(lambda x: run(graph, [], [x])[0], X)
    assert again.operations[0].scope == "norm"


def test_description_names_primitive_scope_and_line():
    (operation,) = traced(jax.named_scope("norm")(lambda x: x.sum(0)), X).operations
    text = describe(operation)
    assert text.startswith("reduce_sum in norm (test_trace.py:")


def test_line_is_named_wherever_the_model_lies(tmp_path):
    """Folders with the names of libraries are the user's as well."""
    folder = tmp_path / "pbjax" / "jax"
    folder.mkdir(parents=True)
    source = folder / "model.py"
    source.write_text("def f(x):\n    return x.sum(0)\n")
    names = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    (operation,) = traced(names["f"], X).operations
    assert describe(operation) == "reduce_sum (model.py:2)"


def test_operations_that_no_output_needs_are_left_out():
    assert primitives(traced(lambda x: (jnp.cos(x), jnp.sin(x))[1], X)) == ["sin"]


def test_operation_of_which_one_result_is_needed_stays():
    graph = traced(lambda x: lax.top_k(x, 2)[1], X)
    assert primitives(graph) == ["top_k"]
    assert len(graph.operations[0].outputs) == 2


def test_unused_inputs_keep_their_numbers():
    graph = traced(lambda x, y: jnp.sin(y), X, X)
    assert graph.operations[0].inputs == (1,)
    assert graph.num_inputs == 2


def test_output_that_is_an_input():
    assert traced(lambda x: x, X).outputs == (0,)


def test_output_that_is_a_weight():
    graph = trace(lambda p, x: (p, x), W, X)
    assert graph.outputs == (0, 1)


def test_output_given_twice():
    graph = traced(lambda x: [jnp.sin(x)] * 2, X)
    assert graph.outputs == (1, 1)


def test_output_that_is_a_literal():
    graph = traced(lambda x: (x, 1.0), X)
    assert isinstance(graph.outputs[1], Literal)
    assert run(graph, [], [X])[1] == 1.0


def test_output_structure_is_kept():
    graph = traced(lambda x: {"a": x, "b": (x, None)}, X)
    assert jax.tree.unflatten(graph.out_tree, run(graph, [], [X])[:2]).keys() == {"a", "b"}


def test_shapes_are_enough():
    graph = traced(jnp.sin, jax.ShapeDtypeStruct((5, 4), jnp.bfloat16))
    assert graph.avals[1].shape == (5, 4)
    assert graph.avals[1].dtype == jnp.bfloat16


def test_evaluation_equals_the_function():
    def f(p, x):
        y = jax.nn.softmax(jax.nn.gelu(x @ p["w"]), axis=-1)
        y = lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p["w"]) + y, y)
        return {"y": y, "top": lax.top_k(y, 2), "sorted": jnp.sort(y, 1)}

    graph = trace(f, {"w": W}, X)
    for got, want in zip(run(graph, [W], [X]), jax.tree.leaves(f({"w": W}, X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_evaluation_runs_under_jit():
    graph = traced(lambda x: jax.nn.softmax(x) @ W, X)
    fast = jax.jit(lambda x: run(graph, [], [x])[0])
    np.testing.assert_allclose(fast(X), run(graph, [], [X])[0], rtol=1e-6)


def test_precision_and_dtype_promotion_of_the_trace_are_kept():
    with jax.default_matmul_precision("highest"):
        graph = traced(lambda x: x @ W, X)
    again = traced(lambda x: run(graph, [], [x])[0], X)
    precision = again.operations[0].params["precision"]
    assert precision == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.debug.print("{}", x) or x,
        lambda x: (jax.debug.callback(print, x), x)[1],
        lambda x: jax.experimental.io_callback(
            lambda x: x, jax.ShapeDtypeStruct((2, 3), x.dtype), x
        ),
    ],
)
def test_side_effects_are_refused(f):
    with pytest.raises(ModelError, match=r"side effects.*remove"):
        traced(f, X)


def sized(batch_size):
    return jax.ShapeDtypeStruct((batch_size, 3), jnp.float32)


def changed(f):
    return difference(traced(f, sized(2)), traced(f, sized(5)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.nn.softmax(x @ W),
        lambda x: x[jnp.arange(len(x)), 0],
        lambda x: (x, 1.0),
        lambda x: x.mean(-1),
        lambda x: x / len(x),
        lambda x: jnp.zeros((len(x), 2)),
    ],
)
def test_traces_at_two_batch_sizes_differ_only_in_shapes(f):
    assert changed(f) is None


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (lambda x: jnp.sin(x) if len(x) > 3 else jnp.cos(x), "cos .*becomes sin"),
        (
            lambda x: functools.reduce(lambda y, _: jnp.sin(y), range(len(x)), x),
            "2 operations become 5",
        ),
        (lambda x: x * (1.0 if len(x) > 3 else x), "input of mul .*changes"),
        (lambda x: (jnp.sin(x), x)[len(x) > 3], "operations become"),
        (lambda x: (jnp.sin(x), jnp.cos(x))[:: 1 if len(x) > 3 else -1], "output 0 changes"),
        (lambda x: (x, x)[: 1 + (len(x) > 3)], "1 outputs become 2"),
        (lambda x: (x, 1.0 if len(x) > 3 else x), "output 1 changes"),
        (
            lambda x: x + jnp.asarray(np.ones((len(x), 1), np.float32)),
            r"captured array read by add \(test_trace.py:\d+\), changes",
        ),
        (
            lambda x: x + jnp.asarray(np.full(3, len(x), np.float32)),
            r"values of the captured array read by .*\(test_trace.py:\d+\), shape \(3,\), change",
        ),
    ],
)
def test_difference_between_traces_is_named(f, found):
    with jax.numpy_rank_promotion("allow"):
        text = changed(f)
    assert text is not None
    assert re.search(found, text)


def test_body_of_a_scan_is_a_graph_of_its_own():
    graph = traced(lambda x: lax.scan(lambda c, w: (jnp.sin(c @ w), c), x, jnp.ones((2, 3, 3))), X)
    scan = graph.operations[-1]
    body = loop_body(scan)
    assert primitives(body) == ["dot_general", "sin"]
    assert body.num_inputs == 2


def test_calls_inside_a_body_are_inlined():
    graph = traced(lambda x: lax.fori_loop(0, 2, lambda i, y: jax.jit(jnp.sin)(y), x), X)
    assert "sin" in primitives(loop_body(graph.operations[-1]))


def test_parts_of_a_scan_by_their_roles():
    def f(x, w, s):
        return lax.scan(lambda c, w: (c @ w + s, c), x, w)

    (scan,) = traced(f, X, np.ones((4, 3, 3), np.float32), X).operations
    parts = scan_parts(scan)
    assert (parts.consts, parts.carry, parts.xs) == ((2,), (0,), (1,))
    assert (*parts.carry_out, *parts.ys) == scan.outputs


def test_branches_as_graphs():
    graph = traced(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)
    branches = graph.operations[-1].params["branches"]
    assert [primitives(body_graph(branch)) for branch in branches] == [["cos"], ["sin"]]
