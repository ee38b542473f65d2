"""Costs of kernels against figures derived by hand: what a kernel does, not its plain form."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.attention import attention, attention_packed
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.depthwise import depthwise_convolution
from pallas_kernels.gemm import gated_gemm, gemm
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.operation import PRIMITIVE
from pbjax.device import ResourceClass, find_device
from pbjax.graph.classify import classify
from pbjax.graph.cost import Cost, equation_cost
from pbjax.graph.trace import trace
from tests.kernel_decoder import H200

B, T, N, K, H = 2, 256, 4, 2, 64
HALF = jnp.bfloat16


def spec(*shape, dtype=HALF):
    return jax.ShapeDtypeStruct(shape, dtype)


def cost_of(f, *inputs):
    with use_abstract_mesh(H200):
        graph = trace(lambda _, *inputs: f(*inputs), (), *inputs)
    (kernel,) = [each for each in graph.operations if each.primitive == PRIMITIVE]
    return equation_cost(kernel.equation)


def depthwise(width, length=512, activation=None):
    x, kernel = spec(B, length, 512), spec(width, 512, dtype=jnp.float32)
    return cost_of(lambda x, w: depthwise_convolution(x, w, activation=activation), x, kernel)


@pytest.mark.parametrize(
    ("width", "length", "met"),
    [
        (1, 512, 512),
        # One frame is missing at either end; the second weight meets all.
        (3, 512, 3 * 512 - 2),
        (31, 512, 31 * 512 - 2 * sum(range(16))),
        # Longer than the sequence: each of four frames meets four.
        (9, 4, 16),
        # One frame more after its own than before it.
        (4, 512, 4 * 512 - (1 + 1 + 2)),
    ],
)
def test_depthwise_convolution_is_a_multiply_add_for_each_frame_and_weight(width, length, met):
    found = depthwise(width, length)
    x = B * length * 512
    # Sums become f32 and bf16, weights bf16, and so do the two zeros beside them.
    assert found.flops == 2 * B * 512 * met + 2 * x + width * 512 + 2
    assert found.bytes == 2 * 2 * x + 4 * width * 512
    assert found.transcendentals == 0


def test_depthwise_convolution_is_bound_by_cuda_cores():
    device = find_device("nvidia-h200")
    x, kernel = spec(32, 512, 1024), spec(31, 1024, dtype=jnp.float32)
    with use_abstract_mesh(H200):
        graph = trace(lambda _, x, w: depthwise_convolution(x, w), (), x, kernel)
    (label,) = classify(graph, device)
    assert label.unit == ResourceClass.CUDA
    assert label.compute_s == pytest.approx(label.cost.flops / device.cuda_flops_per_s)


@pytest.mark.parametrize(("head_dim", "scored"), [(64, 1.5), (128, 2.0)])
def test_scores_by_difference_are_those_that_tiles_meet(head_dim, scored):
    q = spec(B, T, N, head_dim)
    rows, shift = spec(2 * T, N, head_dim), spec(N, head_dim)

    def run(q, k, v, rows, shift):
        return attention(q, k, v, relative_rows=rows, relative_shift=shift)

    found = cost_of(run, q, q, q, rows, shift)
    pairs = B * N * T * T
    # Products with queries, differences and values; softmax and sums are less than a tenth.
    products = 2 * pairs * head_dim * (1 + scored + 1)
    assert products < found.flops < products + 20 * pairs + 10 * B * T * N * head_dim
    assert found.bytes == 2 * (4 * B * T * N * head_dim + 2 * T * N * head_dim + N * head_dim)


def test_attention_without_differences_is_two_products():
    q, k = spec(B, T, N, H), spec(B, T, K, H)
    found = cost_of(attention, q, k, k)
    pairs = B * N * T * T
    assert 4 * pairs * H < found.flops < 4 * pairs * H + 12 * pairs + 4 * B * T * N * H
    assert found.exact


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_packed_sequences_score_their_own_tokens(num_sequences):
    tokens = 1024
    q, k = spec(tokens, N, H), spec(tokens, K, H)
    found = cost_of(attention_packed, q, k, k, spec(num_sequences + 1, dtype=jnp.int32))
    pairs = N * tokens * tokens / num_sequences
    assert 4 * pairs * H < found.flops < 4 * pairs * H + 20 * pairs
    assert found.transcendentals == pytest.approx(pairs)
    # Only equal lengths have so few pairs.
    assert found.exact == (num_sequences == 1)


def test_joined_projection_costs_what_three_do():
    x, one, joined = spec(B, T, 256), spec(256, 256), spec(256, 3 * 256)
    apart, together = cost_of(gemm, x, one), cost_of(gemm, x, joined)
    assert together.flops == 3 * apart.flops == 3 * 2 * B * T * 256 * 256
    # The frames are read once.
    assert together.bytes == 3 * apart.bytes - 2 * 2 * B * T * 256


def test_product_moves_its_operands_and_finishes_on_the_way():
    x, w, bias = spec(64, 128), spec(128, 256), spec(256)
    found = cost_of(lambda x, w, b, r: gemm(x, w, bias=b, residual=r), x, w, bias, spec(64, 256))
    assert found == Cost(
        flops=2.0 * 64 * 128 * 256 + 2 * 64 * 256,
        bytes=2.0 * (64 * 128 + 128 * 256 + 256 + 2 * 64 * 256),
    )


def test_gated_product_is_two():
    x, w = spec(64, 128), spec(128, 256)
    found = cost_of(lambda x, a, b: gated_gemm(x, a, b, activation=None), x, w, w)
    assert found.flops == 2 * 2 * 64 * 128 * 256 + 64 * 256
    assert found.bytes == 2 * (64 * 128 + 2 * 128 * 256 + 64 * 256)


def test_norm_reads_and_writes_each_row_once():
    x, scale = spec(64, 512), spec(512)
    found = cost_of(lambda x, r, s: add_rms_norm(x, r, s, eps=1e-6), x, x, scale)
    assert found.bytes == 2 * (4 * 64 * 512 + 512)


def cache(sequences, size):
    return spec(sequences, size, K, H)


def decode(k, **options):
    q, lengths = spec(8, 1, N, H), spec(8, dtype=jnp.int32)
    operands = [q, k, k, lengths, *options.values()]

    def run(q, k, v, lengths, *more):
        return decode_attention(q, k, v, lengths, **dict(zip(options, more, strict=True)))

    return cost_of(run, *operands)


def test_decode_attention_reads_the_caches_of_its_sequences():
    whole = decode(cache(8, 128))
    ends = 2 * 2 * 8 * N * H + 4 * 8
    assert whole.bytes == 2 * 2 * 8 * 128 * K * H + ends
    # Of a cache of more sequences no more is read.
    assert decode(cache(32, 128)).bytes == whole.bytes


def test_decode_attention_reads_no_more_pages_than_its_table_has():
    table = spec(8, 4, dtype=jnp.int32)
    ends = 2 * 2 * 8 * N * H + 4 * 8 + 4 * 8 * 4
    assert decode(cache(100, 16), page_table=table).bytes == 2 * 2 * 32 * 16 * K * H + ends
    # Sequences that share pages read them once.
    assert decode(cache(10, 16), page_table=table).bytes == 2 * 2 * 10 * 16 * K * H + ends
