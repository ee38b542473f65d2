"""LLaMA's checkpoints: key map, what files may hold besides, a fixed forward pass for checks."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from flax import nnx
from jaxtyping import Array

from models.keymap import Dropped, Family, Leaf, Tie, embedding, linear
from models.llama import LlamaConfig, LlamaModel


def key_map(config: LlamaConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every parameter, with the names of Hugging Face's files."""
    width, mlp = "hidden_size", "intermediate_size"
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    matrix = partial(linear, bias=False)
    leaves = [embedding("embed_tokens", "embeddings", rows="vocab_size", features=width)]
    for index in range(config.num_layers):
        theirs, ours = f"layers.{index}", f"layers.{index}"
        leaves += _norm(f"{theirs}.input_layernorm", f"{ours}.attention.norm")
        for name, short, rows in (
            ("query", "q", heads),
            ("key", "k", kv_heads),
            ("value", "v", kv_heads),
        ):
            leaves += matrix(
                f"{theirs}.self_attn.{short}_proj",
                f"{ours}.attention.{name}",
                outputs=rows,
                inputs=width,
            )
        leaves += matrix(
            f"{theirs}.self_attn.o_proj", f"{ours}.attention.output", outputs=width, inputs=heads
        )
        leaves += _norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp.norm")
        for name in ("gate", "up"):
            leaves += matrix(
                f"{theirs}.mlp.{name}_proj", f"{ours}.mlp.{name}", outputs=mlp, inputs=width
            )
        leaves += matrix(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", outputs=width, inputs=mlp)
    leaves += _norm("norm", "norm")
    if config.lm_head and not config.tie_embeddings:
        leaves.append(embedding("lm_head", "head", rows="vocab_size", features=width))
    return tuple(leaves)


def _norm(key: str, path: str) -> tuple[Leaf, ...]:
    return (Leaf(key=f"{key}.weight", path=f"{path}.scale", axes=("hidden_size",)),)


def _describe(config: LlamaConfig) -> str:
    size = f"{config.num_layers} layers x {config.embed_dim}, vocabulary {config.vocab_size:,}"
    scaled = f"{size}, rope factor {config.rope_factor:g}" if config.rope_factor != 1 else size
    return scaled if config.lm_head else f"{scaled}, no head"


def _example(config: LlamaConfig) -> dict[str, np.ndarray]:
    length = min(16, config.max_seq_len)
    ids = (np.arange(2 * length, dtype=np.int32).reshape(2, length) * 7919 + 13) % config.vocab_size
    mask = np.ones((2, length), np.int32)
    mask[1, : length // 2] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0).astype(np.int32)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def _probe(model: LlamaModel, inputs: Mapping[str, Array | np.ndarray]) -> dict[str, Array]:
    states = model.hidden_states(**inputs)
    output = model(**inputs)
    values = {
        "hidden_embedding": states[0],
        "hidden_block_0": states[1],
        "last_hidden_state": output.last_hidden_state,
    }
    return values if output.logits is None else values | {"logits": output.logits}


FAMILY = Family(
    model_type="llama",
    config=LlamaConfig,
    parse=LlamaConfig.from_hugging_face,
    complete=lambda config, fields, keys: config,
    build=lambda config, dtype: LlamaModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=_describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="model.",
    base=("embed_tokens", "layers", "norm"),
    dropped=(Dropped(label="rotary frequencies", pattern=r"(.+\.)?rotary_emb\.inv_freq"),),
    ties=(Tie(key="lm_head.weight", equals="embed_tokens.weight"),),
    tied_by_default=False,
    example=_example,
    probe=_probe,
)
