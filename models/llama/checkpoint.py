"""LLaMA's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from functools import partial

from flax import nnx

from models.decoder_checkpoint import describe, positioned_example
from models.keymap import Dropped, Family, Leaf, Tie, embedding, linear
from models.llama.config import LlamaConfig
from models.llama.modules import LlamaModel
from models.probing import probe


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
    scaled = config.rope_factor != 1
    return describe(config, f", rope factor {config.rope_factor:g}" if scaled else "")


FAMILY = Family(
    model_type="llama",
    config=LlamaConfig,
    schema=LlamaConfig.schema,
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
    example=lambda config: positioned_example(config.vocab_size, config.max_seq_len),
    probe=probe,
)
