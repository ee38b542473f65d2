"""What stages hold in memory, by hand, and against the memory of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pbjax.device import find_device
from pbjax.graph.trace import trace
from pbjax.planning.memory import predicted_bytes
from pbjax.program.analysis import PROBE_SIZE, analyse
from pbjax.program.fused_costs import held_bytes
from pbjax.program.summarize import summary
from pbjax.runtime.compilation import ProgramSpec
from pbjax.tuning.calls import CallWorkload, StackedWeights

DEVICE = find_device("nvidia-h200")
DIM, TOKENS, BATCH = 32, 48, 12


def lower(analysis, leaves, spec):
    workload = CallWorkload(
        analysis=analysis, stacked=StackedWeights(analysis), leaves=tuple(leaves)
    )
    return workload.lower(spec)


def held(f, *inputs):
    """Bytes while each operation runs; inputs are given, and what f returns is needed."""
    graph = trace(lambda _, *args: f(*args), (), *inputs)
    sizes = [aval.size * aval.dtype.itemsize for aval in graph.avals]
    found = held_bytes(graph.operations, sizes, graph.outputs, graph.inputs)
    return dict(zip((o.primitive for o in graph.operations), found, strict=True))


X = jax.ShapeDtypeStruct((4, 8), jnp.float32)  # 128 bytes
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)  # 256 bytes


def test_values_inside_a_chain_take_no_memory():
    found = held(lambda x: jnp.exp(jnp.tanh(x) + 1), X)
    assert found == {"tanh": 128, "add": 128, "exp": 256}


def test_chain_keeps_what_it_reads_until_it_ends():
    # The product is read by the first link; the chain runs where its last link is.
    found = held(lambda x, w: jnp.exp(jnp.tanh(x @ w) + 1), X, W)
    assert found["dot_general"] == 128 + 256 + 128
    assert found["exp"] == 128 + 128


def test_value_of_another_shape_is_the_same_bytes():
    found = held(lambda x, w: jnp.exp((x @ w).reshape(32)).reshape(8, 4), X, W)
    assert found["exp"] == 128 + 128


def test_without_operations_nothing_is_held():
    assert held(lambda x: x, X) == {}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.joined = nnx.Linear(DIM, 3 * DIM, rngs=rngs)
        self.out = nnx.Linear(DIM, DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.split(self.joined(self.norm(x)), 3, axis=-1)
        heads = [a.reshape(*x.shape[:2], 4, DIM // 4) for a in (q, k, v)]
        x = x + self.out(jax.nn.dot_product_attention(*heads).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Language(nnx.Module):
    """A model whose outputs are as large as what it holds."""

    def __init__(self, rngs, vocabulary):
        self.embed = nnx.Embed(vocabulary, DIM, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


@pytest.fixture(scope="module", params=[16, 1000], ids=["small outputs", "large outputs"])
def model(request):
    module = Language(nnx.Rngs(0), request.param)
    ids = jnp.zeros((BATCH, TOKENS), jnp.int32)
    return analyse(module, (ids,), device=DEVICE, fuse="none"), [ids], request.param


def test_weights_inputs_outputs_and_what_blocks_hand_on_are_counted(model):
    analysis, _, vocabulary = model
    layers = 4 * (4 * (12 * DIM * DIM + DIM * 11))
    found = analysis.summary
    assert found.weight_bytes == 4 * vocabulary * DIM + layers
    assert found.stacked_weight_bytes == layers
    assert found.input_bytes_per_row == 4 * TOKENS
    assert found.output_bytes_per_row == 4 * TOKENS * vocabulary
    assert found.carried_bytes_per_row == 4 * TOKENS * DIM
    assert found.waiting_bytes_per_row == 0


def test_fullest_stage_of_the_block_holds_scores_and_probabilities(model):
    analysis, *_ = model
    x, scores = 4 * TOKENS * DIM, 4 * 4 * TOKENS * TOKENS
    fullest = max(stage.held_bytes_per_row for stage in analysis.summary.block)
    # The values, or all three heads' inputs, are there too.
    assert 2 * scores + x < fullest <= 2 * scores + 5 * x


def test_unsplit_program_is_predicted_within_a_third_of_what_is_compiled(model):
    analysis, leaves, _ = model
    lowered = lower(analysis, leaves, ProgramSpec(sizes=(BATCH,), staggers=(0,)))
    needed = lowered.finish(*lowered.compile()).needed_bytes
    assert 2 / 3 < predicted_bytes(analysis.summary, (BATCH,), (0,)) / needed < 3 / 2


@pytest.mark.parametrize(("sizes", "staggers"), [((8, 4), (0, 1)), ((5, 4, 3), (2, 1, 0))])
def test_staggered_program_fits_into_what_is_predicted(model, sizes, staggers):
    analysis, leaves, _ = model
    spec = ProgramSpec(sizes=sizes, staggers=staggers)
    lowered = lower(analysis, leaves, spec)
    needed = lowered.finish(*lowered.compile()).needed_bytes
    assert needed <= predicted_bytes(analysis.summary, sizes, staggers) < 2 * needed


def test_row_of_any_batch_holds_the_same(model):
    analysis, *_ = model
    program_at = analysis.program_at
    small, large = (summary(program_at(b), program_at(PROBE_SIZE), b) for b in (4, 24))
    assert small == large
