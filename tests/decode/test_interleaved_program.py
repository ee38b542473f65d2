"""Two interleaved halves of a decoder compute what the whole does, whatever runs beside what."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.corun import pairs
from pallas_kernels.testing import assert_close
from pbjax.decode.cost_model import Costs, rates_of
from pbjax.decode.interleave import Role, interleave
from pbjax.decode.interleaved_program import InterleavedProgram
from pbjax.device import find_device
from pbjax.graph.trace import trace
from tests.cases import long_but
from tests.kernel_decoder import H200, LAYERS, WEIGHTS, B, F, decode_step, inputs

RATES = rates_of(find_device("NVIDIA H200"))


@functools.cache
def traced(size):
    with use_abstract_mesh(H200):
        return trace(lambda p, *i: decode_step(*i), (), *inputs(size))


def interleaved(sizes, capacity):
    """The program, the items of both sub-batches, and the launches."""
    graphs = tuple(traced(size) for size in sizes)
    costs = Costs((traced(B), traced(2)), (B, 2), RATES)
    sub_batches = tuple(costs.items(size) for size in sizes)
    launches = interleave(*sub_batches, capacity)
    return InterleavedProgram(graphs=graphs, launches=launches), sub_batches, launches


def halves(tree, size):
    return jax.tree.map(lambda x: x[:size], tree), jax.tree.map(lambda x: x[size:], tree)


def test_products_carry_and_attention_rides():
    _, (sub_batch, _), _ = interleaved((8, 8), 1.4)
    roles = [item.role for item in sub_batch if item.role != Role.ALONE]
    assert roles == [Role.COMPUTE, Role.MEMORY, Role.COMPUTE, Role.COMPUTE, Role.COMPUTE] * LAYERS
    assert {item.parts for item in sub_batch if item.role == Role.MEMORY} == {8}


@pytest.mark.parametrize("case", long_but([((8, 8), 1.4), ((11, 5), 1e6), ((2, 14), 0.0)]))
def test_interleaved_halves_compute_what_the_whole_does(case):
    sizes, capacity = case
    program, _, launches = interleaved(sizes, capacity)
    assert any(launch.memory for launch in launches) == (capacity > 0)
    given = inputs(B)
    first, second = halves(given, sizes[0])
    outputs = jax.jit(program.__call__)(
        list(program.graphs[0].constants), jax.tree.leaves(first), jax.tree.leaves(second)
    )
    expected = jax.tree.leaves(decode_step(*given))
    for *parts, whole in zip(*outputs, expected, strict=True):
        got = jnp.concatenate(parts)
        assert_close(got, whole.astype(jnp.float32), reduction=F, roundings=8 * LAYERS)


def test_parts_of_a_guest_are_its_sequences_and_join_to_the_whole():
    x, caches, lengths = inputs(B)
    q = x.reshape(B, 1, -1, 64)
    given = {"q": q, "k": caches[0][0], "v": caches[0][1], "lengths": lengths, "scale": 0.125}
    given |= {"page_table": None, "alibi_slopes": None, "first_sequence": 0}
    call = pairs.Call(name="decode_attention", arguments=given)
    assert pairs.num_parts(call) == 8
    joined = pairs.join([pairs.part(call, 0, 5), pairs.part(call, 5, 1), pairs.part(call, 6, 2)])
    assert_close(joined, pairs.part(call, 0, 8).astype(jnp.float32), reduction=1)


def test_a_part_of_a_large_batch_is_what_keeps_all_sms_busy():
    shapes = {"q": jnp.zeros((250, 1, 4, 8)), "k": jnp.zeros((250, 1, 8, 8))}
    call = pairs.Call(name="decode_attention", arguments=shapes)
    assert pairs.num_parts(call) == 16


def test_the_constants_of_the_decoder_are_its_weights():
    program, _, _ = interleaved((8, 8), 1.4)
    assert len(program.graphs[0].constants) == len(jax.tree.leaves(WEIGHTS))
