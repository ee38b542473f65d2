"""FLOPs of the six families against counts by hand, and rooflines of full-size models."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import ConformerConfig, ConformerEncoder
from models.presets import PRESETS, find_shape
from pbjax.device import ResourceClass, find_device
from pbjax.graph.cost import equation_cost
from pbjax.graph.functional import functional
from pbjax.graph.trace import trace
from pbjax.roofline.report import roofline_report
from tests.shapes import few_layers

H200 = find_device("NVIDIA H200")
B, T = 4, 128
# FLOPs, transcendental functions among them, of one element of an activation function as the models
# write it: erfc is 60 for XLA's polynomials and 1; the rest are products, sums and conversions.
GELU, GELU_TANH, SILU = 68, 12, 7


def attention(rows, keys, width):
    """Two products of every query with every key of its sequence, 2 FLOPs for each feature."""
    return 4 * rows * keys * width


def dense(rows, *sizes):
    return sum(2 * rows * k * n for k, n in sizes)


def mlp_width(config):
    """BLOOM's is four times the width always."""
    return getattr(config, "mlp_dim", 4 * config.embed_dim)


def block(config, rows, keys):
    """A layer of the original Transformer: four projections, attention, two layers of MLP."""
    width, inner = config.embed_dim, mlp_width(config)
    layers = dense(rows, *[(width, width)] * 4, (width, inner), (inner, width))
    return layers + attention(rows, keys, width)


def bert(config):
    width = config.embed_dim
    pooler = dense(B, (width, width))
    products = config.num_layers * block(config, B * T, T) + pooler
    return products, GELU * config.num_layers * B * T * config.mlp_dim


def vit(config):
    patches, width = config.num_patches, config.embed_dim
    tokens = patches + 1
    embeddings = dense(B * patches, (config.num_channels * config.patch_size**2, width))
    head = dense(B, (width, config.num_labels))
    products = embeddings + config.num_layers * block(config, B * tokens, tokens) + head
    return products, GELU * config.num_layers * B * tokens * config.mlp_dim


def decoder(config, rows):
    """GPT-2 and BLOOM; of a prompt only the last token goes through the head."""
    products = config.num_layers * block(config, rows, T)
    products += dense(B, (config.embed_dim, config.vocab_size))
    return products, GELU_TANH * config.num_layers * rows * mlp_width(config)


def llama(config, rows):
    width, inner = config.embed_dim, config.mlp_dim
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    layer = dense(rows, (width, queries), (width, keys), (width, keys), (queries, width))
    layer += dense(rows, *[(width, inner)] * 2, (inner, width)) + attention(rows, T, queries)
    products = config.num_layers * layer + dense(B, (width, config.vocab_size))
    return products, SILU * config.num_layers * rows * inner


def conformer(config):
    """Two half MLPs, attention with relative positions, and a gated convolution."""
    width, inner, rows = config.embed_dim, config.mlp_dim, B * T
    square = width, width
    layer = 2 * dense(rows, (width, inner), (inner, width))
    layer += dense(rows, *[square] * 4) + attention(rows, T, width)
    # One row for each of the 2 T - 1 distances, projected, and met by every query.
    layer += dense(2 * T - 1, square) + 2 * rows * (2 * T - 1) * width
    side = (config.kernel_size - 1) // 2
    taps = sum(min(T, t + side + 1) - max(0, t - side) for t in range(T))
    layer += dense(rows, (width, 2 * width), square) + 2 * B * taps * width
    return config.num_layers * layer, SILU * config.num_layers * rows * (2 * inner + width)


@cache
def call(name, phase):
    shape = few_layers(name)
    return shape.config, shape.call(phase, B, None if name.startswith("vit") else T)


def conformer_call():
    config = replace(ConformerConfig.conformer_l(), num_layers=2)
    model = nnx.eval_shape(lambda: ConformerEncoder(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    return config, model, (jax.ShapeDtypeStruct((B, T, config.embed_dim), jnp.bfloat16),)


CASES = {
    "vit-base": ("forward", vit),
    "bert-base": ("forward", bert),
    "gpt2-xl": ("prefill", lambda config: decoder(config, B * T)),
    "bloom-7b1": ("prefill", lambda config: decoder(config, B * T)),
    "llama3-8b": ("prefill", lambda config: llama(config, B * T)),
    "conformer-l": ("forward", conformer),
    "gpt2": ("decode", lambda config: decoder(config, B)),
    "bloom-560m": ("decode", lambda config: decoder(config, B)),
    "llama3.2-1b": ("decode", lambda config: llama(config, B)),
}


def case(name):
    """Config, function, inputs, positions of a cache, and FLOPs by hand."""
    phase, by_hand = CASES[name]
    if name == "conformer-l":
        config, model, inputs = conformer_call()
        return model, inputs, (), by_hand(config)
    config, found = call(name, phase)
    return found.function, found.inputs, found.cache, by_hand(config)


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_counted_by_hand(name):
    function, inputs, cached, (products, activations) = case(name)
    found = roofline_report(function, *inputs, device=H200, cache=cached)
    assert found.total.flops == pytest.approx(products + activations, rel=0.01)
    seam = functional(function)
    contractions = ("dot_general", "conv_general_dilated")
    counted = sum(
        equation_cost(o.equation).flops
        for o in trace(seam.apply, seam.params, *inputs).operations
        if o.primitive in contractions
    )
    assert counted == pytest.approx(products, rel=1e-9)
    assert found.exact
    assert not found.unknown


def report(name, phase, batch, seq, shape_of=few_layers):
    found = shape_of(name).call(phase, batch, seq)
    return roofline_report(found.function, *found.inputs, device=H200, cache=found.cache)


def test_llama3_8b_makes_no_weights():
    before = sum(array.nbytes for array in jax.live_arrays())
    found = report("llama3-8b", "prefill", 8, 512, find_shape)
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e9
    assert found.memory.weight_bytes == 16_060_522_752


def test_a_decode_step_reads_each_weight_once_and_the_cache_once():
    found = report("llama3-8b", "decode", 8, 1024)
    traffic, memory = found.total.traffic, found.memory
    table = 2 * 128_256 * 4096
    assert traffic.weights == pytest.approx(memory.weight_bytes - table, rel=1e-3)
    assert traffic.kv_cache == pytest.approx(memory.kv_cache_bytes, rel=2e-3)
    assert found.total.seconds >= (memory.weight_bytes - table) / 4.8e12


@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_decode_attention_is_bound_by_memory_at_every_batch(batch):
    points = [
        p for p in report("llama3.2-1b", "decode", batch, 2048).points if p.kind == "attention"
    ]
    assert [p.resource for p in points] == [ResourceClass.MEMORY]


def test_dense_layers_leave_memory_at_a_large_batch():
    classes = [
        {p.resource for p in report("llama3.2-1b", "decode", batch, 64).points if p.kind == "dense"}
        for batch in (1, 4096)
    ]
    assert classes == [{ResourceClass.MEMORY}, {ResourceClass.TENSOR}]


def test_stages_are_the_scopes_of_the_model():
    found = report("llama3.2-1b", "prefill", 2, 64)
    assert [s.name for s in found.stages if s.repeats == 2] == ["attention", "mlp"]
    groups = {s.name: [p.name for p in s.points if p.kind != "other"] for s in found.stages}
    assert groups["attention"] == ["query", "key", "value", "attention", "output"]
    assert groups["mlp"] == ["gate", "up", "down"]


def test_kernels_change_neither_stages_nor_flops():
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    plain = report("llama3.2-1b", "decode", 8, 256)
    target = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    with use_abstract_mesh(target):
        kernels = report("llama3.2-1b", "decode", 8, 256)
    assert kernels.total.flops == pytest.approx(plain.total.flops, rel=1e-2)
    assert kernels.total.traffic.kv_cache == pytest.approx(plain.total.traffic.kv_cache, rel=1e-2)
    blocks = [sum(s.seconds for s in r.stages if s.name != "head") for r in (kernels, plain)]
    assert blocks[0] == pytest.approx(blocks[1], rel=2e-2)


@pytest.mark.parametrize("name", ["minilm", "gpt2", "bloom-560m", "vit-base", "lasr-ctc"])
def test_presets_have_their_phases(name):
    assert name in PRESETS
    phases = few_layers(name).phases
    assert phases == (("prefill", "decode") if name in ("gpt2", "bloom-560m") else ("forward",))
