"""Models that call kernels: equal to plain ones and to Hugging Face's values, on any device.

Off a Hopper GPU a kernel's public function computes in plain JAX what the kernel would, so that
what models hand it is checked here; the kernels themselves are checked in test_kernels_*.py.
"""

import dataclasses
import importlib
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import models
from models.attention import Keys, Packing, attention
from models.bloom.modules import alibi_bias, alibi_slopes
from models.conformer.convolution import BatchNorm, FoldedConvolution, depthwise_convolution
from models.conformer.positions import relative_bias, shift
from models.kernels import HOPPER, PLAIN, Kernels, with_kernels
from models.numeric import TOLERANCE, errors_against, read_reference
from models.parameters import fingerprint
from pbjax.device import find_device
from pbjax.program.analysis import analyse
from tests.kernel_layers import lowered

DATA = Path(__file__).parents[1] / "data"
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
PALLAS = Kernels(
    attention="pallas",
    ragged_attention="pallas",
    causal_attention="pallas",
    alibi_attention="pallas",
    gemm="pallas",
    norm="pallas",
)
FOLDED = dataclasses.replace(PALLAS, norm="folded")
FIXTURES = {
    "bert": "bert",
    "bert_default": "bert",
    "bloom": "bloom",
    "conformer": "wav2vec2-conformer",
    "conformer_rotary": "wav2vec2-conformer",
    "gpt2": "gpt2",
    "lasr": "lasr_ctc",
    "llama": "llama",
    "parakeet": "parakeet_ctc",
    "vit": "vit",
    "vit_default": "vit",
    "vit_features": "vit",
}
SMALL = {"num_layers": 2, "embed_dim": 128, "num_heads": 2}
WIDE = SMALL | {"mlp_dim": 256}
CONFORMER = {"gemm": 20, "gated_gemm": 2, "attention": 2, "layer_norm": 11}


def full_width(name):
    """A small bfloat16 model whose widths kernels take, and inputs of it."""
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    replace, rngs = dataclasses.replace, nnx.Rngs(0)
    match name:
        case "bert":
            config = replace(models.BertConfig.base(), **WIDE, vocab_size=99, pooler=False)
            return models.BertModel(config, dtype="bfloat16", rngs=rngs), (ids, ids)
        case "vit":
            config = replace(models.ViTConfig.base(), **WIDE, image_size=48, num_labels=0)
            pixels = jax.ShapeDtypeStruct((4, 3, 48, 48), jnp.bfloat16)
            return models.ViTModel(config, dtype="bfloat16", rngs=rngs), (pixels,)
        case "conformer":
            config = replace(models.ConformerConfig.conformer_l(), **WIDE)
            frames = jax.ShapeDtypeStruct((2, 16, 128), jnp.bfloat16)
            return models.ConformerEncoder(config, dtype="bfloat16", rngs=rngs), (frames,)
        case "gpt2":
            config = replace(models.GPT2Config.small(), **WIDE, vocab_size=99, lm_head=False)
            return models.GPT2Model(config, dtype="bfloat16", rngs=rngs), (ids, ids)
        case "bloom":
            config = replace(models.BloomConfig.bloom_560m(), **SMALL, vocab_size=99)
            return models.BloomModel(config, dtype="bfloat16", rngs=rngs), (ids, ids)
        case "llama":
            sizes = WIDE | {"num_kv_heads": 1, "head_dim": 64, "vocab_size": 99}
            config = replace(models.LlamaConfig.llama3_8b(), **sizes, lm_head=False)
            return models.LlamaModel(config, dtype="bfloat16", rngs=rngs), (ids, ids)


def launches(name, kernels):
    """How often each kernel stands in the program of a small model for an H200."""
    model, inputs = full_width(name)
    if kernels is not None:
        model = with_kernels(model, kernels)
    graphdef, state = nnx.split(model)
    text = lowered(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs), state, *inputs)
    return Counter(re.findall(r"pbjax_[a-z_]+", text)), text.count("mosaic_gpu")


def operations(name, kernels):
    """How often each kernel stands in the program of a small model as it is traced for an H200."""
    model, inputs = full_width(name)
    graphdef, state = nnx.split(with_kernels(model, kernels))
    with use_abstract_mesh(H200):
        jaxpr = jax.make_jaxpr(lambda s, *x: nnx.merge(graphdef, s)(*x))(state, *inputs)
    return Counter(
        e.params["name"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "pallas_kernel"
    )


def random_mask(generator, batch_size, length):
    mask = generator.integers(0, 2, (batch_size, length))
    mask[:, length // 2] = 1
    return mask


@pytest.mark.parametrize("kernels", [PALLAS, FOLDED], ids=["kernels", "folded norms"])
@pytest.mark.parametrize("name", FIXTURES)
def test_values_agree_with_transformers(name, kernels):
    family = importlib.import_module(models.FAMILIES[FIXTURES[name]]).FAMILY
    plain = family.probe
    probed = dataclasses.replace(family, probe=lambda m, x: plain(with_kernels(m, kernels), x))
    model, reference = models.load(DATA / name), read_reference(DATA / name / "reference.npz")
    errors = errors_against(probed, model.config, model, reference)
    assert {point: error for point, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"gemm": 12, "attention": 2, "layer_norm": 5}),
        ("vit", {"gemm": 13, "attention": 2, "layer_norm": 5}),
        ("conformer", {**CONFORMER, "depthwise_convolution": 2}),
        ("gpt2", {"gemm": 12, "attention": 2, "layer_norm": 5}),
        ("bloom", {"gemm": 12, "attention": 2, "layer_norm": 6}),
        ("llama", {"gemm": 6, "gated_gemm": 2, "attention": 2, "rms_norm": 5}),
    ],
)
def test_every_family_lowers_to_kernels(name, expected):
    assert operations(name, PALLAS) == expected
    _, calls = launches(name, PALLAS)
    assert calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit", {"gemm": 1, "attention": 2, "layer_norm": 1}),
        ("gpt2", {"attention": 2, "layer_norm": 1}),
        ("bloom", {"attention": 2, "layer_norm": 2}),
        ("llama", {"attention": 2, "rms_norm": 1}),
    ],
)
def test_folded_norms_leave_the_last_one_and_those_outside_layers(name, expected):
    found = operations(name, FOLDED)
    products = {kind: found.pop(kind) for kind in ("normed_gemm", "gemm_for_norm")}
    assert products == {"normed_gemm": 4 if name == "llama" else 8, "gemm_for_norm": 4}
    assert found == expected


@pytest.mark.parametrize("name", ["bert", "conformer"])
def test_norms_that_are_not_folded_are_kernels(name):
    assert operations(name, FOLDED) == operations(name, PALLAS)


def test_folded_norms_need_products_by_kernels():
    with pytest.raises(models.InputError, match="gemm is 'pallas'"):
        dataclasses.replace(FOLDED, gemm="xla")


@pytest.mark.parametrize(("by", "in_memory"), [("pallas", False), ("xla", True)])
def test_scores_of_a_conformer_are_in_memory_for_plain_jax_alone(by, in_memory):
    model, (frames,) = full_width("conformer")
    kernels = dataclasses.replace(PALLAS, attention=by)
    graphdef, state = nnx.split(with_kernels(model, kernels))
    with use_abstract_mesh(H200):
        jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, frames)
    length = frames.shape[1]
    shapes = [x.aval.shape for equation in jaxpr.jaxpr.eqns for x in equation.outvars]
    assert any(shape[-2:] == (length, length) for shape in shapes) is in_memory


@pytest.mark.parametrize("name", ["bert", "vit", "conformer", "gpt2", "bloom", "llama"])
def test_a_model_as_made_calls_no_kernel(name):
    assert launches(name, None) == ({}, 0)


def test_kernels_are_those_of_the_device_the_program_is_for():
    model, _ = full_width("bert")
    assert with_kernels(model).kernels == PLAIN
    with use_abstract_mesh(H200):
        assert with_kernels(model).kernels == HOPPER


def test_the_given_model_stays_as_it_is():
    model, _ = full_width("gpt2")
    before = fingerprint(model)
    other = with_kernels(model, PALLAS)
    assert (model.kernels, model.layers[0].mlp.up.kernels) == (PLAIN, PLAIN)
    assert fingerprint(model) == before
    assert other.layers[0].mlp.up.kernel[...] is model.layers[0].mlp.up.kernel[...]


@pytest.mark.parametrize("choice", [{"norm": "fold"}, {"gemm": "cudnn"}, {"attention": None}])
def test_a_choice_that_there_is_not_is_refused(choice):
    kernels, ((name, value),) = Kernels(), choice.items()
    object.__setattr__(kernels, name, value)  # Tests check annotations before a call begins.
    with pytest.raises(models.InputError, match=rf"Kernels\({name}={value!r}\): .* 'xla'"):
        kernels.__post_init__()


@pytest.mark.parametrize("name", ["bert", "bloom", "conformer", "gpt2", "llama", "vit"])
@pytest.mark.parametrize("kernels", [PALLAS, FOLDED], ids=["kernels", "folded norms"])
def test_a_model_that_calls_kernels_can_be_given_again(name, kernels):
    loaded = models.load(DATA / name)
    again = with_kernels(with_kernels(with_kernels(loaded, PALLAS), kernels), kernels)
    assert fingerprint(again) == fingerprint(with_kernels(loaded, kernels))
    assert all(m.kernels == kernels for _, m in nnx.iter_modules(again) if hasattr(m, "kernels"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "bloom", "llama"])
def test_holes_in_the_mask_change_nothing(name):
    # Not only padding at an end: any token may be left out.
    model = models.load(DATA / name)
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 60, (3, 11)).astype(np.int32)
    mask = random_mask(generator, 3, 11)
    plain, packed = (
        np.asarray(m(ids, mask).last_hidden_state) for m in (model, with_kernels(model, PALLAS))
    )
    error = np.abs(plain - packed)[mask != 0].max() / plain[mask != 0].std()
    assert error <= TOLERANCE


def test_packing_brings_tokens_to_the_front_and_back():
    mask = np.array([[0, 1, 0, 1], [1, 1, 1, 0]])
    packing = Packing.of(mask)
    ids = np.array([[10, 11, 12, 13], [20, 21, 22, 23]], np.int32)
    np.testing.assert_array_equal(packing.lengths, [2, 3])
    packed = packing.pack(ids)
    np.testing.assert_array_equal(packed, [[11, 13, 10, 12], [20, 21, 22, 23]])
    states = jnp.asarray(packed, jnp.float32)[..., None]
    np.testing.assert_array_equal(packing.unpack(states)[..., 0], ids)


@pytest.mark.parametrize("length", [7, 16, 256])
def test_relative_bias_is_the_shifted_scores(length):
    keys = jax.random.split(jax.random.key(length), 3)
    query = jax.random.normal(keys[0], (2, length, 3, 8))
    rows = jax.random.normal(keys[1], (2 * length - 1, 3, 8))
    rest = jax.random.normal(keys[2], (3, 8))
    shifted = shift(jnp.einsum("BTNH,RNH->BNTR", query + rest[None, None], rows))
    actual = relative_bias(query, rows, rest, chunk=16)
    np.testing.assert_allclose(actual, shifted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("length", "width"), [(100, 31), (64, 32), (7, 9)])
def test_folded_convolution_is_convolution_and_batch_norm(length, width, bias):
    keys = jax.random.split(jax.random.key(width), 7)
    x = jax.random.normal(keys[0], (2, length, 12))
    kernel = jax.random.normal(keys[1], (width, 1, 12))
    added = jax.random.normal(keys[2], (12,)) if bias else None
    batch_norm = BatchNorm(12, eps=1e-5, dtype="float32")
    for part, key in zip(("scale", "bias", "mean", "var"), keys[3:], strict=True):
        getattr(batch_norm, part)[...] = jax.random.uniform(key, (12,)) + 0.5
    convolved = depthwise_convolution(x, kernel)
    if added is not None:
        convolved += added[None, None]
    expected = jax.nn.silu(batch_norm(convolved))
    actual = FoldedConvolution(kernel, added, batch_norm, "silu")(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=3e-5)


def test_alibi_slopes_are_the_alibi_bias():
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (2, 9, 4, 8)) for k in keys)
    slopes = alibi_slopes(4)
    by_slope = attention(query, key, value, Keys(by="pallas", causal=True, slopes=slopes))
    terms = {
        "bias": models.layers.causal_bias(9, None),
        "alibi": alibi_bias(4, 9, None),
    }
    by_bias = attention(query, key, value, Keys(by="xla", **terms))
    np.testing.assert_allclose(by_slope, by_bias, atol=1e-5)


def test_a_lengthened_table_scores_and_looks_up_the_same_tokens():
    model = models.load(DATA / "gpt2")
    longer = with_kernels(model, PALLAS)
    size = model.config.vocab_size
    assert size % 64
    assert longer.embeddings.word.embedding.shape[0] % 64 == 0
    ids = np.array([[1, 2, size, size + 1]], np.int32)
    plain, found = model(ids), longer(ids)
    assert found.logits.shape == plain.logits.shape
    np.testing.assert_allclose(found.logits[:, :2], plain.logits[:, :2], rtol=1e-4, atol=1e-5)
    assert np.isnan(longer.embeddings(ids, None)[0, 2:]).all()


@pytest.mark.parametrize("kernels", [PALLAS, FOLDED], ids=["kernels", "folded norms"])
@pytest.mark.parametrize("name", ["bert", "vit", "conformer", "gpt2", "bloom", "llama"])
def test_the_engine_finds_the_layers_of_a_model_with_kernels(name, kernels):
    model, inputs = full_width(name)
    inputs = [jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype) for x in inputs]
    with use_abstract_mesh(H200):
        found = analyse(with_kernels(model, kernels), inputs, device=find_device("NVIDIA H200"))
    assert found.summary.num_blocks == model.config.num_layers
