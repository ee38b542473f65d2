"""The repeated block: found by structure, and fed like the operations that it stands for."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal

from pallas_kernels.testing import assert_close
from pbjax.graph.trace import evaluate, trace
from pbjax.program.blocks import Apart, Stacked, extract_block
from pbjax.program.repetition import Repetition, find_repetition
from tests.networks import D, normal

WEIGHTS = [normal(i, D, D) * 0.3 for i in range(8)]
W = WEIGHTS[0]


def found(function, *inputs):
    graph = trace(lambda params, *args: function(*args), (), *inputs)
    repetition = find_repetition(graph, [1.0] * len(graph.operations), graph)
    return graph, repetition, extract_block(graph, repetition)


def layers(num_layers, layer):
    weights = WEIGHTS[:num_layers]

    def model(x):
        for w in weights:
            x = layer(x, w)
        return x

    return model


def outputs_through_the_block(graph, repetition, block, inputs):
    """Runs what stands before the block, the block count times, and what stands after it."""
    env = dict(zip(graph.weights, map(jnp.asarray, graph.constants), strict=True))
    env.update(zip(graph.inputs, inputs, strict=True))
    read = lambda env, atom: atom.val if isinstance(atom, Literal) else env[atom]  # noqa: E731
    evaluate(graph.operations[: repetition.start], env)
    carried = {carry.inner: read(env, carry.initial) for carry in block.carry}
    collected = [[] for _ in block.ys]
    for k in range(block.count):
        inner = dict(carried)
        inner |= {link.inner: read(env, link.outer) for link in block.consts}
        for link in block.xs:
            apart = isinstance(link, Apart)
            inner[link.inner] = read(env, link.outer[k]) if apart else read(env, link.outer)[k]
        inner = {value: jnp.asarray(x) for value, x in inner.items()}
        evaluate(block.operations, inner)
        for pieces, link in zip(collected, block.ys, strict=True):
            pieces.append(read(inner, link.inner))
        carried = {carry.inner: read(inner, carry.result) for carry in block.carry}
    env |= {carry.final: carried[carry.inner] for carry in block.carry}
    for pieces, link in zip(collected, block.ys, strict=True):
        many = not isinstance(link.outer, int)
        env |= (
            dict(zip(link.outer, pieces, strict=True)) if many else {link.outer: jnp.stack(pieces)}
        )
    evaluate(graph.operations[repetition.end :], env)
    return [read(env, atom) for atom in graph.outputs]


def check_equivalent(function, *inputs):
    graph, repetition, block = found(function, *inputs)
    expected = jax.tree.leaves(function(*inputs))
    for a, b in zip(
        outputs_through_the_block(graph, repetition, block, inputs), expected, strict=True
    ):
        assert_close(a, b, reduction=D, roundings=20)
    return block


@pytest.mark.parametrize("num_layers", [2, 3, 7])
def test_layers_of_a_loop_are_found(num_layers):
    block = check_equivalent(layers(num_layers, lambda x, w: jnp.tanh(x @ w) + x), normal(9, 4, D))
    assert block.count == num_layers
    assert len(block.operations) == 3
    (link,) = block.xs
    assert isinstance(link, Apart)
    assert len(set(link.outer)) == num_layers


def test_names_do_not_matter():
    def model(x):
        for i, w in enumerate(WEIGHTS[:4]):
            with jax.named_scope(f"something_{i * i}"):
                x = jnp.sin(x @ w)
        return x

    assert check_equivalent(model, normal(9, 4, D)).count == 4


def test_weight_of_all_layers_is_shared():
    block = check_equivalent(layers(4, lambda x, _: jnp.tanh(x @ W) + x), normal(9, 4, D))
    assert block.count == 4
    assert not block.xs
    assert len(block.consts) == 1


def test_input_read_by_every_layer_is_shared():
    def model(x, mask):
        for w in WEIGHTS[:4]:
            x = jnp.tanh(x @ w) * mask + x
        return x

    block = check_equivalent(model, normal(9, 4, D), normal(8, 4, D))
    assert block.count == 4
    assert len(block.consts) == 1


def test_two_values_carried_from_layer_to_layer():
    def model(x, y):
        for w in WEIGHTS[:4]:
            x, y = jnp.tanh(y @ w) + x, x * 0.5
        return x - y

    block = check_equivalent(model, normal(9, 4, D), normal(8, 4, D))
    assert block.count >= 3
    assert len(block.carry) == 2


def test_first_layers_that_differ_are_no_part_of_the_block():
    def model(x):
        x = jnp.exp(x @ W)
        for w in WEIGHTS[:5]:
            x = jnp.tanh(x @ w) + x
        return jnp.log(jnp.abs(x)) @ W

    assert check_equivalent(model, normal(9, 4, D)).count == 5


def test_outputs_of_every_layer_are_collected():
    def model(x):
        kept = []
        for w in WEIGHTS[:4]:
            x = jnp.tanh(x @ w) + x
            kept.append(x * 2)
        return kept

    assert check_equivalent(model, normal(9, 4, D)).count == 4


def test_layer_that_reads_two_layers_back_is_still_computed_right():
    def model(x):
        before = x
        for w in WEIGHTS[:6]:
            x, before = jnp.tanh(x @ w) + before, x
        return x

    check_equivalent(model, normal(9, 4, D))


def test_dense_skips_do_not_repeat():
    def model(x):
        kept = [x]
        for w in WEIGHTS[:4]:
            kept.append(jnp.tanh(sum(kept) @ w))
        return kept[-1]

    check_equivalent(model, normal(9, 4, D))


def test_literals_that_differ_are_different_layers():
    def model(x):
        for i in range(4):
            x = jnp.tanh(x * (i + 1.5)) @ W
        return x

    assert check_equivalent(model, normal(9, 4, D)).count == 1


def test_scan_is_the_block():
    weights = jnp.stack(WEIGHTS[:5])

    def model(x):
        def body(x, w):
            x = jnp.tanh(x @ w) + x
            return x, x.sum(axis=-1)

        return jax.lax.scan(body, x, weights)

    block = check_equivalent(model, normal(9, 4, D))
    assert block.count == 5
    assert [type(link) for link in block.xs] == [Stacked]
    assert len(block.ys) == 1


@pytest.mark.parametrize("options", [{"reverse": True}, {"length": 1}])
def test_scan_that_cannot_be_staggered_is_kept_whole(options):
    length = options.get("length", 5)
    weights = jnp.stack(WEIGHTS[:length])

    def model(x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights, **options)[0]

    _, repetition, _ = found(model, normal(9, 4, D))
    assert not repetition.scanned
    check_equivalent(model, normal(9, 4, D))


def test_scan_whose_carry_is_swapped():
    def model(x, y):
        return jax.lax.scan(lambda c, _: ((c[1], c[0] * 0.5), c[0]), (x, y), length=3)

    check_equivalent(model, normal(9, 4, D), normal(8, 4, D))


def test_nothing_repeats_in_a_short_function():
    graph, repetition, block = found(lambda x: jnp.exp(x @ W), normal(9, 4, D))
    assert repetition == Repetition(start=0, period=len(graph.operations), count=1)
    assert block.count == 1


def test_stretch_of_little_time_is_not_the_block():
    function = layers(3, lambda x, w: jnp.tanh(x @ w))
    graph = trace(lambda params, x: jnp.exp(function(x)) @ W, (), normal(9, 4, D))
    seconds = [0.01] * len(graph.operations)
    seconds[-1] = 99.0
    assert find_repetition(graph, seconds, graph).count == 1


LAYERS = (
    lambda x, w, s: jnp.tanh(x @ w),
    lambda x, w, s: x + jnp.sin(x),
    lambda x, w, s: x * s,
    lambda x, w, s: x - x.mean(axis=-1, keepdims=True),
    lambda x, w, s: jnp.where(x > 0, x, 0.1 * x),
)


@settings(max_examples=25, derandomize=True, phases=[Phase.generate])
@given(
    pattern=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3),
    count=st.integers(1, 4),
    before=st.lists(st.sampled_from(LAYERS), max_size=2),
    after=st.lists(st.sampled_from(LAYERS), max_size=2),
    kept=st.booleans(),
)
def test_block_of_any_network_computes_what_the_network_computes(
    pattern, count, before, after, kept
):
    steps = (*before, *pattern * count, *after)
    weights = [WEIGHTS[i % 8] for i in range(len(steps))]

    def model(x, s):
        values = []
        for step, w in zip(steps, weights, strict=True):
            x = step(x, w, s)
            values.append(x)
        return values if kept else x

    check_equivalent(model, normal(9, 4, D), normal(8, 4, D))


def test_scan_over_the_rows_is_no_block():
    def model(x):
        return jax.lax.map(lambda row: jnp.tanh(row @ jnp.ones((3, 3))), x)

    graph, probe = (trace(lambda _, x: model(x), (), jnp.ones((b, 2, 3))) for b in (5, 2))
    assert not find_repetition(graph, [1.0] * len(graph.operations), probe).scanned
