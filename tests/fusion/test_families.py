"""Fusion of the package's own families, written in plain JAX: every attention, norm and MLP."""

from collections import Counter
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import models
from pbjax.fusion import fuse
from pbjax.graph.functional import functional
from pbjax.graph.trace import trace

DATA = Path(__file__).parents[1] / "data"
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
# What is left of norms, softmax and activations where a pattern has missed one.
PARTS = {"exp", "rsqrt", "sqrt", "erf", "erfc", "tanh", "logistic", "reduce_max"}
IDS = np.ones((2, 12), np.int32)
MASK = (np.arange(12)[None] < np.array([[12], [7]])).astype(np.int32)
LAYERS = 2


@cache
def model(name):
    return models.load(DATA / name)


@cache
def fused(name, *, masked):
    reference = np.load(DATA / name / "reference.npz")
    given = [key for key in ("pixel_values", "input_values", "input_features")]
    found = [reference[f"inputs.{key}"] for key in given if f"inputs.{key}" in reference.files]
    inputs = [jnp.asarray(found[0])] if found else [jnp.asarray(IDS)]
    if masked:
        mask = reference["inputs.attention_mask"] if found else MASK
        inputs.append(jnp.asarray(mask))
    seam = functional(model(name))
    with use_abstract_mesh(H200):
        return fuse(trace(seam.apply, seam.params, *inputs))


def kernels(fusion, pattern):
    return Counter(m.kernel for m in fusion.matches if m.pattern == pattern)


@pytest.mark.parametrize(
    ("name", "masked", "kernel"),
    [
        ("vit", False, "attention"),
        ("bert", False, "attention"),
        ("bert", True, "attention(key_bias)"),
        ("gpt2", False, "attention(causal)"),
        ("gpt2", True, "attention(causal, key_bias)"),
        ("bloom", False, "attention(causal, alibi)"),
        ("bloom", True, "attention(causal, bias)"),
        ("llama", False, "attention(causal, grouped)"),
        ("llama", True, "attention(causal, grouped, key_bias)"),
        ("conformer", True, "attention(lengths, bias)"),
        ("conformer_rotary", False, "attention"),
        ("parakeet", False, "attention(bias)"),
        ("lasr", False, "attention"),
    ],
)
def test_every_attention_is_one_kernel(name, masked, kernel):
    fusion = fused(name, masked=masked)
    assert kernels(fusion, "attention") == {kernel: LAYERS}
    # Parakeet's convolution has a gate with biases.
    assert [m.pattern for m in fusion.misses] == ["gated_gemm"] * LAYERS * (name == "parakeet")


@pytest.mark.parametrize(
    ("name", "norms", "rest"),
    [
        ("vit", {"layer_norm": 2 * LAYERS + 1}, {}),
        ("bert", {"layer_norm": 2 * LAYERS + 1}, {"tanh": 1}),  # the pooler's
        ("gpt2", {"layer_norm": 2 * LAYERS + 1}, {}),
        ("bloom", {"layer_norm": 2 * LAYERS + 2}, {}),
        ("llama", {"rms_norm": 2 * LAYERS + 1}, {}),
    ],
)
def test_no_norm_and_no_activation_is_left(name, norms, rest):
    fusion = fused(name, masked=False)
    found = Counter(m.kernel for m in fusion.matches if m.pattern.endswith("norm"))
    assert found == norms
    left = Counter(o.primitive for o in fusion.graph.operations if o.primitive in PARTS)
    assert left == rest


@pytest.mark.parametrize("name", ["conformer", "conformer_rotary", "parakeet", "lasr"])
def test_of_a_conformer_only_what_follows_a_convolution_is_left(name):
    fusion = fused(name, masked=name == "conformer")
    # The convolution's activation and BatchNorm, and its gate where that has a bias.
    left = {o.scope.split("/")[0] for o in fusion.graph.operations if o.primitive in PARTS}
    assert left <= {"convolution", "positions", "features"}
    assert sum(m.pattern == "layer_norm" for m in fusion.matches) >= 5 * LAYERS


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("vit", "gemm(bias, gelu)"),
        ("bert", "gemm(bias, gelu)"),
        ("gpt2", "gemm(bias, gelu_tanh)"),
        ("bloom", "gemm(bias, gelu_tanh)"),
        ("llama", "gated_gemm(silu)"),
    ],
)
def test_every_mlp_is_two_kernels(name, kernel):
    found = Counter(m.kernel for m in fused(name, masked=False).matches)
    assert found[kernel] == LAYERS
    residual = "gemm(residual)" if name == "llama" else "gemm(bias, residual)"
    assert found[residual] == 2 * LAYERS  # of the attention and of the MLP
    # Where attention reads them as they are, products of one input stay three.
    assert found["gemm(3 joined)"] == (LAYERS if name == "llama" else 0)
    apart = {"vit": 3, "bert": 3, "gpt2": 1, "bloom": 1, "llama": 0}
    around = {"vit": 2, "bert": 1}  # patches and classes; pooler
    assert found["gemm(bias)"] == apart[name] * LAYERS + around.get(name, 0)


def test_a_gate_that_is_half_of_a_product_is_one_kernel():
    assert kernels(fused("conformer", masked=True), "gated_gemm") == {"gated_gemm(sigmoid)": LAYERS}


def test_all_layers_read_one_bias_made_of_a_padding_mask():
    operations = fused("bert", masked=True).graph.operations
    read = [set(o.inputs) for o in operations if o.params.get("name") == "attention"]
    assert len(read) == LAYERS
    (bias,) = set.intersection(*read)
    assert next(o for o in operations if bias in o.outputs).primitive == "select_n"
