import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pbjax.device import Device, ResourceClass, find_device
from pbjax.graph.classify import MIN_ROWS, class_shares, classify
from pbjax.graph.cost import total_cost
from pbjax.graph.trace import trace

TENSOR, CUDA, MEMORY = ResourceClass.TENSOR, ResourceClass.CUDA, ResourceClass.MEMORY
H200 = find_device("NVIDIA H200")

# Tensor ridge point at 100 FLOP/byte, vector one at 10 operations a byte.
PLAIN = Device(
    kind="plain",
    slug="plain",
    tensor_flops_per_s={"bfloat16": 1e14, "float32": 1e14},
    cuda_flops_per_s=1e13,
    memory_bytes_per_s=1e12,
    num_sms=100,
    memory_bytes=10**11,
    source="made up for tests",
)


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def labels_of(f, *inputs, device=PLAIN):
    return classify(trace(lambda params, *args: f(*args), (), *inputs), device)


def last(f, *inputs, device=PLAIN):
    return labels_of(f, *inputs, device=device)[-1]


def test_large_product_is_tensor():
    label = last(jnp.matmul, spec(1024, 1024), spec(1024, 1024))
    assert label.resource == TENSOR
    assert label.seconds == 2 * 1024**3 / 1e14


def test_decode_product_is_memory_bound_by_its_weight():
    label = last(jnp.matmul, spec(8, 4096), spec(4096, 4096))
    assert label.resource == MEMORY
    assert label.seconds == label.cost.bytes / 1e12


@pytest.mark.parametrize(("rows", "resource"), [(96, MEMORY), (110, TENSOR)])
def test_product_crosses_the_ridge_point_with_its_rows(rows, resource):
    """With a large weight the intensity in bfloat16 is about the number of rows."""
    assert last(jnp.matmul, spec(rows, 8192), spec(8192, 8192)).resource == resource


def test_product_with_few_rows_and_columns_is_not_tensor():
    """Many terms, but a result that leaves a tensor-core tile mostly empty."""
    device = Device(**{**fields(PLAIN), "tensor_flops_per_s": {"bfloat16": 2e12}})
    few = MIN_ROWS // 2
    assert last(jnp.matmul, spec(few, 4096), spec(4096, few), device=device).resource == CUDA
    many = MIN_ROWS
    assert last(jnp.matmul, spec(many, 4096), spec(4096, few), device=device).resource == TENSOR


def fields(device):
    return {name: getattr(device, name) for name in Device.__dataclass_fields__}


def test_dense_convolution_is_tensor_and_depthwise_is_not():
    def conv(groups):
        def f(x, kernel):
            return lax.conv_general_dilated(
                x,
                kernel,
                (1,),
                "SAME",
                feature_group_count=groups,
                dimension_numbers=("NWC", "WIO", "NWC"),
            )

        return last(f, spec(8, 512, 512), spec(31, 512 // groups, 512)).resource

    assert conv(1) == TENSOR
    assert conv(512) != TENSOR


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + 1,
        lambda x: x.sum(-1),
        jnp.transpose,
        lambda x: x.astype(jnp.float32),
        lambda x: lax.sort(x, dimension=0)[0],
    ],
)
def test_light_work_is_memory_bound(f):
    assert last(f, spec(1024, 1024)).resource == MEMORY


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.lgamma(x),
        lambda x: lax.erf_inv(x),
        lambda x: lax.integer_pow(x, 2**30 - 1),
    ],
)
def test_work_that_the_vector_units_bound_is_cuda(f):
    label = last(f, spec(2**20, dtype=jnp.float32))
    assert label.resource == CUDA
    assert label.seconds > label.cost.bytes / 1e12


def test_embedding_is_memory():
    assert last(lambda t, i: t[i], spec(30000, 768), spec(64, dtype=jnp.int32)).resource == MEMORY


def test_unknown_primitive_is_memory_and_says_that_it_is_unknown():
    f = lambda x: jax.pure_callback(lambda x: x, spec(4, 8), x)  # noqa: E731
    label = last(f, spec(4, 8))
    assert label.resource == MEMORY
    assert not label.cost.known


def test_scan_is_labelled_by_its_body():
    def layers(x, w):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    one = labels_of(lambda x, w: jnp.tanh(x @ w), spec(1024, 1024), spec(1024, 1024))
    label = last(layers, spec(1024, 1024), spec(7, 1024, 1024))
    assert label.resource == TENSOR
    assert label.seconds == pytest.approx(7 * sum(part.seconds for part in one))


def test_loop_and_branch_are_labelled_by_their_bodies():
    x = spec(1024, 1024)
    loop = last(lambda x: lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ y, x), x)
    assert loop.resource == TENSOR
    branch = last(
        lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x), spec(dtype=jnp.bool_), x
    )
    assert branch.resource == TENSOR


def test_every_operation_has_one_label():
    graph = trace(lambda _, x: jax.nn.softmax(x @ x), (), spec(64, 64))
    assert len(classify(graph, PLAIN)) == len(graph.operations)


def test_shares_add_up_to_the_whole():
    labels = labels_of(lambda x: jax.nn.gelu(jax.nn.softmax(x @ x)), spec(1024, 1024))
    shares = class_shares(labels)
    total = total_cost(label.cost for label in labels)
    assert [share.resource for share in shares] == list(ResourceClass)
    assert sum(share.operations for share in shares) == len(labels)
    assert sum(share.flops for share in shares) == total.flops + total.transcendentals
    assert sum(share.bytes for share in shares) == total.bytes
    assert sum(s.seconds for s in shares) == pytest.approx(sum(lb.seconds for lb in labels))


def test_shares_of_nothing_are_zero():
    assert {share.seconds for share in class_shares([])} == {0.0}


def test_bert_layer_on_an_h200_is_tensor_work_and_bandwidth_bound_work():
    """Measured there: the products take about half the time, GELU and norms the other half."""

    def layer(x, w1, w2):
        y = x @ w1
        return jax.nn.gelu(y) @ w2 + x

    shapes = spec(96 * 384, 768), spec(768, 3072), spec(3072, 768)
    shares = {s.resource: s for s in class_shares(labels_of(layer, *shapes, device=H200))}
    assert shares[TENSOR].flops > 0.95 * sum(s.flops for s in shares.values())
    assert shares[MEMORY].seconds > shares[CUDA].seconds
