"""Transformers as ten users write them: each with its inputs and the kernels expected of it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

B, S, N, K, H, D, F = 2, 6, 4, 2, 8, 32, 48


@dataclass(frozen=True, kw_only=True)
class UserModel:
    model: object
    inputs: tuple
    kernels: Counter
    variables: object = None


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def weight(seed, *shape, dtype=jnp.float32):
    return (normal(seed, *shape) * shape[0] ** -0.5).astype(dtype)


def tokens(dtype=jnp.float32):
    return normal(1, B, S, D, dtype=dtype)


LENGTHS = jnp.array([4, 6])
PADDING = jnp.arange(S)[None] < LENGTHS[:, None]


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxEncoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def nnx_encoder():
    """Pre-norm with Flax's own attention and tanh GELU."""
    layer = {"layer_norm": 2, "attention": 1, "gemm(bias, residual)": 2}
    layer |= {"gemm(bias)": 3, "gemm(bias, gelu_tanh)": 1}
    return UserModel(
        model=NnxEncoder(nnx.Rngs(0)),
        inputs=(tokens(),),
        kernels=Counter({name: 2 * count for name, count in layer.items()}),
    )


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[:, :, 0])
        y = nn.MultiHeadDotProductAttention(num_heads=N)(x, mask=mask)
        x = nn.LayerNorm(epsilon=1e-5)(x + y)
        y = nn.Dense(D)(nn.gelu(nn.Dense(F)(x), approximate=False))
        return nn.LayerNorm(epsilon=1e-5)(x + y)


def linen_decoder():
    """Post-norm, causal, exact GELU."""
    model = LinenDecoder()
    kernels = {"gemm(bias)": 3, "attention(causal)": 1, "gemm(bias, residual)": 2}
    kernels |= {"layer_norm": 2, "gemm(bias, gelu)": 1}
    return UserModel(
        model=model,
        inputs=(tokens(),),
        variables=model.init(jax.random.key(0), tokens()),
        kernels=Counter(kernels),
    )


class NnxLlama(nnx.Module):
    """jax.nn's attention with lengths and grouped heads, RMSNorm, SwiGLU."""

    def __init__(self, rngs):
        def linear(*sizes):
            return nnx.Linear(*sizes, use_bias=False, rngs=rngs)

        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2)])
        self.q, self.k, self.v = linear(D, N * H), linear(D, K * H), linear(D, K * H)
        self.out, self.gate, self.up, self.down = (
            linear(a, b) for a, b in ((D, D), (D, F), (D, F), (F, D))
        )

    def __call__(self, x, lengths):
        y = self.norms[0](x)
        q, k, v = (f(y).reshape(*x.shape[:2], -1, H) for f in (self.q, self.k, self.v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)
        x = x + self.out(y.reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def nnx_llama():
    kernels = {"rms_norm": 2, "attention(causal, lengths, grouped)": 1, "gemm(residual)": 2}
    return UserModel(
        model=NnxLlama(nnx.Rngs(0)),
        inputs=(tokens(), LENGTHS),
        kernels=Counter(kernels | {"gated_gemm(silu)": 1}),
    )


def hand_layer_norm(x, scale, bias):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-12) * scale + bias


def einsum_bert():
    """Weights with an axis of heads, an additive padding mask, post-norm."""
    q, k, v = (weight(i, D, N, H) for i in (2, 3, 4))
    out, up, down = weight(5, N, H, D), weight(6, D, F), weight(7, F, D)
    scale, bias, bias_up = normal(8, D), normal(9, D), normal(10, F)

    def model(x, mask):
        heads = (jnp.einsum("btd,dnh->btnh", x, w) for w in (q, k, v))
        q_, k_, v_ = heads
        scores = jnp.einsum("btnh,bsnh->bnts", q_, k_) / np.sqrt(H)
        scores = scores + (1.0 - mask[:, None, None, :].astype(jnp.float32)) * -1e9
        context = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v_)
        x = hand_layer_norm(x + jnp.einsum("btnh,nhd->btd", context, out), scale, bias)
        inner = jax.nn.gelu(x @ up + bias_up, approximate=False)
        return hand_layer_norm(x + inner @ down, scale, bias)

    kernels = {
        "attention(key_bias)": 1,
        "gemm(residual)": 2,
        "layer_norm": 2,
        "gemm(bias, gelu)": 1,
    }
    return UserModel(model=model, inputs=(tokens(), PADDING), kernels=Counter(kernels))


def hand_rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return scale * wide.astype(x.dtype)


def bfloat16_llama():
    """16-bit, norms and softmax in f32, heads repeated, rotated by hand, causal by tril."""
    dtype = jnp.bfloat16
    q, out = weight(2, D, N * H, dtype=dtype), weight(5, N * H, D, dtype=dtype)
    k, v = (weight(i, D, K * H, dtype=dtype) for i in (3, 4))
    gate, up, down = (
        weight(i, *s, dtype=dtype) for i, s in ((6, (D, F)), (7, (D, F)), (8, (F, D)))
    )
    scales = [1 + normal(i, D, dtype=dtype) * 0.1 for i in (9, 10)]

    def rotate(x):
        angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** jnp.linspace(0, 1, H // 2)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    def model(x):
        y = hand_rms_norm(x, scales[0])
        q_, k_, v_ = (jnp.reshape(y @ w, (*x.shape[:2], -1, H)) for w in (q, k, v))
        k_, v_ = (jnp.repeat(a, N // K, axis=2) for a in (rotate(k_), v_))
        q_, k_, v_ = (jnp.swapaxes(a, 1, 2) for a in (rotate(q_), k_, v_))
        scores = (q_ @ jnp.swapaxes(k_, -1, -2)).astype(jnp.float32) * H**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
        y = jax.nn.softmax(scores, axis=-1).astype(dtype) @ v_
        x = x + jnp.swapaxes(y, 1, 2).reshape(x.shape) @ out
        y = hand_rms_norm(x, scales[1])
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down

    kernels = {"rms_norm": 2, "attention(causal, grouped)": 1, "gemm(residual)": 2}
    return UserModel(
        model=model,
        inputs=(tokens(dtype),),
        kernels=Counter(kernels | {"gemm(3 joined)": 1, "gated_gemm(silu)": 1}),
    )


def alibi_decoder():
    """ALiBi as a distance times slopes, softmax written out, ReLU, norm without bias."""
    qkv, out = weight(2, D, 3 * D), weight(3, D, D)
    up, down, bias = weight(4, D, F), weight(5, F, D), normal(6, F)
    distance = np.arange(S)[None] - np.arange(S)[:, None]
    alibi = np.exp2(-np.arange(1.0, N + 1))[:, None, None] * distance
    alibi = np.where(distance > 0, -np.inf, alibi).astype(np.float32)

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def model(x):
        q, k, v = jnp.split(norm(x) @ qkv, 3, axis=-1)
        q, k, v = (a.reshape(*x.shape[:2], N, H).transpose(0, 2, 1, 3) for a in (q, k, v))
        scores = jnp.matmul(q * H**-0.5, k.transpose(0, 1, 3, 2)) + alibi
        top = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        y = jnp.matmul(top / top.sum(-1, keepdims=True), v).transpose(0, 2, 1, 3)
        x = x + y.reshape(x.shape) @ out
        return x + jnp.maximum(norm(x) @ up + bias, 0) @ down

    kernels = {"layer_norm": 2, "attention(causal, alibi)": 1, "gemm(residual)": 2}
    return UserModel(
        model=model, inputs=(tokens(),), kernels=Counter(kernels | {"gemm(bias, relu)": 1})
    )


def grouped_decode_step():
    """One token over a cache: grouped heads by reshape, keys up to a position."""
    q, out, scale = weight(2, D, N * H), weight(3, N * H, D), normal(4, D)

    def model(x, keys, values, position):
        y = (hand_rms_norm(x, scale) @ q).reshape(-1, K, N // K, H)
        scores = jnp.einsum("bkgh,bskh->bkgs", y, keys) * H**-0.5
        seen = jnp.arange(keys.shape[1])[None, None, None] <= position[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        y = jnp.einsum("bkgs,bskh->bkgh", weights, values)
        return x + y.reshape(x.shape) @ out

    cache = tuple(normal(i, B, S, K, H) for i in (5, 6))
    kernels = {"rms_norm": 1, "decode_attention(lengths, grouped)": 1, "gemm(residual)": 1}
    return UserModel(
        model=model,
        inputs=(normal(1, B, D), *cache, LENGTHS - 1),
        kernels=Counter(kernels),
    )


def vmapped_heads():
    """A function of one sequence and one head under two vmaps; gated by a sigmoid."""
    q, k, v = (weight(i, N, D, H) for i in (2, 3, 4))
    gate, value = weight(5, N * H, D), weight(6, N * H, D)

    def head(x, q, k, v):
        scores = (x @ q) @ (x @ k).T / jnp.sqrt(H)
        return jax.nn.softmax(scores) @ (x @ v)

    def sequence(x):
        y = jax.vmap(head, in_axes=(None, 0, 0, 0), out_axes=1)(x, q, k, v)
        y = y.reshape(x.shape[0], -1)
        return x + jax.nn.sigmoid(y @ gate) * (y @ value)

    kernels = Counter({"attention": 1, "gated_gemm(sigmoid)": 1})
    return UserModel(model=jax.vmap(sequence), inputs=(tokens(),), kernels=kernels)


class ParallelBlock(nn.Module):
    """Attention and MLP of one norm side by side; a mask of padding and of the future."""

    @nn.compact
    def __call__(self, x, padding):
        y = nn.LayerNorm(use_fast_variance=False)(x)
        q, k, v = (nn.DenseGeneral((N, H), use_bias=False, name=name)(y) for name in "qkv")
        causal = nn.make_causal_mask(padding)
        mask = nn.combine_masks(causal, nn.make_attention_mask(jnp.ones_like(padding), padding))
        context = nn.dot_product_attention(q, k, v, mask=mask)
        attended = nn.DenseGeneral(D, axis=(-2, -1))(context)
        return x + attended + nn.Dense(D)(nn.silu(nn.Dense(F)(y)))


def linen_parallel():
    model = ParallelBlock()
    inputs = tokens(), PADDING
    kernels = {"layer_norm": 1, "attention(causal, key_bias)": 1, "gemm(bias, residual)": 2}
    return UserModel(
        model=model,
        inputs=inputs,
        variables=model.init(jax.random.key(0), *inputs),
        kernels=Counter(kernels | {"gemm(bias, silu)": 1}),
    )


def windowed_embedder():
    """Embeddings summed and normalised, local attention, half a residual."""
    words, positions = normal(2, 50, D), normal(3, S, D)
    qkv, up, down = weight(4, D, 3, N, H), weight(5, D, F), weight(6, F, D)
    scale, bias, bias_down = normal(7, D), normal(8, D), normal(9, D)

    def model(ids):
        x = words[ids] + jnp.broadcast_to(positions, (*ids.shape, D))
        typed = jnp.take(words, ids * 0, axis=0)
        total = x + typed
        y = hand_layer_norm(total, scale, bias)
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, qkv[:, i]) for i in range(3))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(2, 0))
        x = total + y.reshape(total.shape)
        return x + 0.5 * (nnx.swish(x @ up) @ down + bias_down)

    kernels = {"add_layer_norm": 1, "attention(causal, window)": 1, "gemm(silu)": 1}
    return UserModel(
        model=model,
        inputs=(jax.random.randint(jax.random.key(0), (B, S), 0, 50),),
        kernels=Counter(kernels | {"gemm(bias, residual, scale)": 1}),
    )


CASES: tuple[Callable[[], UserModel], ...] = (
    nnx_encoder,
    linen_decoder,
    nnx_llama,
    einsum_bert,
    bfloat16_llama,
    alibi_decoder,
    grouped_decode_step,
    vmapped_heads,
    linen_parallel,
    windowed_embedder,
)
