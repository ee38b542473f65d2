"""A small decoder made of kernels, and what traces it for a GPU that is not there."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gated_gemm, gemm
from pallas_kernels.norm import add_rms_norm, rms_norm

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
LAYERS, B, S, N, K, H, F = 3, 16, 24, 4, 2, 64, 256
D = N * H


def normal(seed, *shape):
    return (jax.random.normal(jax.random.key(seed), shape) * shape[0] ** -0.5).astype(jnp.bfloat16)


def layer_weights(seed):
    shapes = {"qkv": (D, D + 2 * K * H), "out": (D, D), "gate": (D, F), "up": (D, F)}
    shapes |= {"down": (F, D)}
    weights = {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return weights | {"scale_in": jnp.ones(D, jnp.bfloat16), "scale_mid": jnp.ones(D, jnp.bfloat16)}


WEIGHTS = [layer_weights(10 * i) for i in range(LAYERS)]


def decode_step(x, caches, lengths):
    """One token of every sequence through a small decoder of kernels; returns the caches too."""
    rows, written = jnp.arange(x.shape[0]), []
    for w, (keys, values) in zip(WEIGHTS, caches, strict=True):
        y = rms_norm(x, w["scale_in"], eps=1e-5)
        q, k, v = jnp.split(gemm(y, w["qkv"]), [D, D + K * H], axis=1)
        keys = keys.at[rows, lengths - 1].set(k.reshape(-1, K, H))
        values = values.at[rows, lengths - 1].set(v.reshape(-1, K, H))
        y = decode_attention(q.reshape(-1, 1, N, H), keys, values, lengths).reshape(x.shape)
        y, x = add_rms_norm(gemm(y, w["out"]), x, w["scale_mid"], eps=1e-5)
        x = gemm(gated_gemm(y, w["gate"], w["up"]), w["down"], residual=x)
        written.append((keys, values))
    return x, written


def inputs(batch_size):
    caches = [
        tuple(normal(100 * i + j, batch_size, S, K, H) for j in range(2)) for i in range(LAYERS)
    ]
    lengths = jax.random.randint(jax.random.key(5), (batch_size,), 1, S + 1)
    return normal(1, batch_size, D), caches, lengths
