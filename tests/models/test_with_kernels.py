"""Models that call kernels: equal to plain ones and to Hugging Face's values, on any device.

Off a Hopper GPU a kernel's public function computes in plain JAX what the kernel would, so that
what models hand it is checked here; the kernels themselves are checked in test_kernels_*.py.
"""

import dataclasses
import importlib
import re
from collections import Counter
from functools import cache, partial
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
# Second fixtures of a family, whose plain models are among the quick tests.
OTHERS = ("bert_default", "vit_default", "vit_features")
SMALL = {"embed_dim": 128, "num_heads": 2}
WIDE = SMALL | {"mlp_dim": 256}
CONFORMER = {"gemm": 10, "gated_gemm": 1, "attention": 1, "layer_norm": 6}
# The families whose norms can be folded; folded norms are kernels in the others.
PRE_NORM = ("vit", "gpt2", "bloom", "llama")


def cases(quick, long):
    """Names with their kernels, of which some run with the long tests alone."""
    marked = [(case, ()) for case in quick] + [(case, pytest.mark.long) for case in long]
    return [
        pytest.param(name, kernels, marks=marks, id=f"{name}-{kernels.norm} norms")
        for (name, kernels), marks in marked
    ]


# What tests share is never written to: `with_kernels` returns other modules.
@cache
def loaded(name):
    return models.load(DATA / name)


@cache
def full_width(name, num_layers=2):
    """A small bfloat16 model whose widths kernels take, and inputs of it."""
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    replace, rngs = partial(dataclasses.replace, num_layers=num_layers), nnx.Rngs(0)
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


@cache
def traced(name, kernels, num_layers=1):
    """The program of a small model as it is traced for an H200."""
    model, inputs = full_width(name, num_layers)
    graphdef, state = nnx.split(with_kernels(model, kernels))
    with use_abstract_mesh(H200):
        return jax.jit(lambda s, *x: nnx.merge(graphdef, s)(*x)).trace(state, *inputs)


def operations(name, kernels, num_layers=1):
    """How often each kernel stands in the traced program."""
    return Counter(
        e.params["name"]
        for e in traced(name, kernels, num_layers).jaxpr.jaxpr.eqns
        if e.primitive.name == "pallas_kernel"
    )


def launches(name, kernels):
    """How often kernels stand in the lowered program, by what Mosaic calls them and by ours."""
    with use_abstract_mesh(H200):
        text = traced(name, kernels).lower(lowering_platforms=("cuda",)).as_text()
    return Counter(re.findall(r"pbjax_[a-z_]+", text)), text.count("mosaic_gpu")


@nnx.jit
def call(model, *inputs):
    return model(*inputs)


def normal(seed, *shapes):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def random_mask(generator, batch_size, length):
    mask = generator.integers(0, 2, (batch_size, length))
    mask[:, length // 2] = 1
    return mask


@pytest.mark.parametrize(
    ("name", "kernels"),
    cases(
        [
            *((name, PALLAS) for name in FIXTURES if name not in OTHERS),
            *((name, FOLDED) for name in PRE_NORM),
        ],
        [*((name, PALLAS) for name in OTHERS), ("vit_default", FOLDED), ("vit_features", FOLDED)],
    ),
)
def test_values_agree_with_transformers(name, kernels):
    family = importlib.import_module(models.FAMILIES[FIXTURES[name]]).FAMILY
    plain = family.probe
    probed = dataclasses.replace(family, probe=lambda m, x: plain(with_kernels(m, kernels), x))
    model, reference = loaded(name), read_reference(DATA / name / "reference.npz")
    errors = errors_against(probed, model.config, model, reference)
    assert {point: error for point, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"gemm": 6, "attention": 1, "layer_norm": 3}),
        ("vit", {"gemm": 7, "attention": 1, "layer_norm": 3}),
        ("conformer", {**CONFORMER, "depthwise_convolution": 1}),
        ("gpt2", {"gemm": 6, "attention": 1, "layer_norm": 3}),
        ("bloom", {"gemm": 6, "attention": 1, "layer_norm": 4}),
        ("llama", {"gemm": 3, "gated_gemm": 1, "attention": 1, "rms_norm": 3}),
    ],
)
def test_every_family_calls_kernels(name, expected):
    assert operations(name, PALLAS) == expected


# The first two call every kernel.
@pytest.mark.parametrize(
    "name",
    [
        "conformer",
        "llama",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("bert", "vit", "gpt2", "bloom")),
    ],
)
def test_every_family_lowers_to_kernels(name):
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
    found = operations(name, FOLDED, num_layers=2)
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
    jaxpr = traced("conformer", dataclasses.replace(PALLAS, attention=by)).jaxpr
    length = full_width("conformer")[1][0].shape[1]
    shapes = [x.aval.shape for equation in jaxpr.jaxpr.eqns for x in equation.outvars]
    assert any(shape[-2:] == (length, length) for shape in shapes) is in_memory


@pytest.mark.parametrize("name", ["bert", "vit", "conformer", "gpt2", "bloom", "llama"])
def test_a_model_as_made_calls_no_kernel(name):
    assert launches(name, PLAIN) == ({}, 0)


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
    model = loaded(name)
    again = with_kernels(with_kernels(with_kernels(model, PALLAS), kernels), kernels)
    assert fingerprint(again) == fingerprint(with_kernels(model, kernels))
    assert all(m.kernels == kernels for _, m in nnx.iter_modules(again) if hasattr(m, "kernels"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "bloom", "llama"])
def test_holes_in_the_mask_change_nothing(name):
    # Not only padding at an end: any token may be left out.
    model = loaded(name)
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 60, (3, 11)).astype(np.int32)
    mask = random_mask(generator, 3, 11)
    plain, packed = (
        np.asarray(call(m, ids, mask).last_hidden_state)
        for m in (model, with_kernels(model, PALLAS))
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
    shapes = ((2, length, 3, 8), (2 * length - 1, 3, 8), (3, 8))
    query, rows, rest = normal(length, *shapes)
    shifted = shift(jnp.einsum("BTNH,RNH->BNTR", query + rest[None, None], rows))
    actual = relative_bias(query, rows, rest, chunk=16)
    np.testing.assert_allclose(actual, shifted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("length", "width"), [(100, 31), (64, 32), (7, 9)])
def test_folded_convolution_is_convolution_and_batch_norm(length, width, bias):
    x, kernel, added = normal(width, (2, length, 12), (width, 1, 12), (12,))
    if not bias:
        added = None
    batch_norm = BatchNorm(12, eps=1e-5, dtype="float32")
    generator = np.random.default_rng(0)
    for part in ("scale", "bias", "mean", "var"):
        values = generator.uniform(0.5, 1.5, 12).astype(np.float32)
        getattr(batch_norm, part)[...] = jnp.asarray(values)
    convolved = depthwise_convolution(x, kernel)
    if added is not None:
        convolved += added[None, None]
    expected = jax.nn.silu(batch_norm(convolved))
    actual = FoldedConvolution(kernel, added, batch_norm, "silu")(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=3e-5)


def test_alibi_slopes_are_the_alibi_bias():
    query, key, value = normal(0, *[(2, 9, 4, 8)] * 3)
    slopes = alibi_slopes(4)
    by_slope = attention(query, key, value, Keys(by="pallas", causal=True, slopes=slopes))
    terms = {
        "bias": models.layers.causal_bias(9, None),
        "alibi": alibi_bias(4, 9, None),
    }
    by_bias = attention(query, key, value, Keys(by="xla", **terms))
    np.testing.assert_allclose(by_slope, by_bias, atol=1e-5)


def test_a_lengthened_table_scores_and_looks_up_the_same_tokens():
    model = loaded("gpt2")
    longer = with_kernels(model, PALLAS)
    size = model.config.vocab_size
    assert size % 64
    assert longer.embeddings.word.embedding.shape[0] % 64 == 0
    ids = np.array([[1, 2, size, size + 1]], np.int32)
    plain, found = call(model, ids), call(longer, ids)
    assert found.logits.shape == plain.logits.shape
    np.testing.assert_allclose(found.logits[:, :2], plain.logits[:, :2], rtol=1e-4, atol=1e-5)
    assert np.isnan(longer.embeddings(ids, None)[0, 2:]).all()


@pytest.mark.parametrize(
    ("name", "kernels"),
    cases(
        [
            *((name, PALLAS) for name in ("bert", "conformer", "llama")),
            *((name, FOLDED) for name in PRE_NORM),
        ],
        [(name, PALLAS) for name in ("vit", "gpt2", "bloom")],
    ),
)
def test_the_engine_finds_the_layers_of_a_model_with_kernels(name, kernels):
    model, inputs = full_width(name)
    inputs = [jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype) for x in inputs]
    with use_abstract_mesh(H200):
        found = analyse(with_kernels(model, kernels), inputs, device=find_device("NVIDIA H200"))
    assert found.summary.num_blocks == model.config.num_layers
