"""BLOOM's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from functools import partial

from flax import nnx

from models.bloom.config import BloomConfig
from models.bloom.modules import BloomModel
from models.decoder_checkpoint import describe, example
from models.keymap import Family, Leaf, Tie, embedding, linear, norm
from models.probing import probe


def key_map(config: BloomConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every parameter, with the names of Hugging Face's files."""
    width = "hidden_size"
    dense = partial(linear, outputs=width, inputs=width)
    leaves = [embedding("word_embeddings", "embeddings.word", rows="vocab_size", features=width)]
    leaves += norm("word_embeddings_layernorm", "embeddings.norm", features=width)
    for index in range(config.num_layers):
        theirs, ours = f"h.{index}", f"layers.{index}"
        leaves += norm(f"{theirs}.input_layernorm", f"{ours}.attention.norm", features=width)
        leaves += dense(
            f"{theirs}.self_attention.query_key_value", f"{ours}.attention.query_key_value"
        )
        leaves += dense(f"{theirs}.self_attention.dense", f"{ours}.attention.output")
        leaves += norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp.norm", features=width)
        leaves += dense(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up")
        leaves += dense(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down")
    leaves += norm("ln_f", "norm", features=width)
    if config.lm_head and not config.tie_embeddings:
        leaves.append(embedding("lm_head", "head", rows="vocab_size", features=width))
    return tuple(leaves)


FAMILY = Family(
    model_type="bloom",
    config=BloomConfig,
    schema=BloomConfig.schema,
    parse=BloomConfig.from_hugging_face,
    complete=lambda config, fields, keys: config,
    build=lambda config, dtype: BloomModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="transformer.",
    base=("word_embeddings", "word_embeddings_layernorm", "h", "ln_f"),
    dropped=(),
    ties=(Tie(key="lm_head.weight", equals="word_embeddings.weight"),),
    example=lambda config: example(config.vocab_size, length=16),
    probe=probe,
)
