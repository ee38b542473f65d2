"""GPT-2's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from flax import nnx

from models.decoder_checkpoint import describe, positioned_example
from models.gpt2.config import GPT2Config
from models.gpt2.modules import GPT2Model
from models.keymap import Dropped, Family, Leaf, Tie, conv1d, embedding, norm
from models.probing import probe


def key_map(config: GPT2Config) -> tuple[Leaf, ...]:
    """Returns one leaf for every parameter, with the names of Hugging Face's files."""
    width, mlp = "n_embd", "n_inner"
    leaves = [
        embedding("wte", "embeddings.word", rows="vocab_size", features=width),
        embedding("wpe", "embeddings.position", rows="n_positions", features=width),
    ]
    for index in range(config.num_layers):
        theirs, ours = f"h.{index}", f"layers.{index}"
        leaves += norm(f"{theirs}.ln_1", f"{ours}.attention.norm", features=width)
        leaves += conv1d(
            f"{theirs}.attn.c_attn",
            f"{ours}.attention.query_key_value",
            outputs=width,
            inputs=width,
        )
        leaves += conv1d(
            f"{theirs}.attn.c_proj", f"{ours}.attention.output", outputs=width, inputs=width
        )
        leaves += norm(f"{theirs}.ln_2", f"{ours}.mlp.norm", features=width)
        leaves += conv1d(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", outputs=mlp, inputs=width)
        leaves += conv1d(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", outputs=width, inputs=mlp)
    leaves += norm("ln_f", "norm", features=width)
    if config.lm_head and not config.tie_embeddings:
        leaves.append(embedding("lm_head", "head", rows="vocab_size", features=width))
    return tuple(leaves)


FAMILY = Family(
    model_type="gpt2",
    config=GPT2Config,
    schema=GPT2Config.schema,
    parse=GPT2Config.from_hugging_face,
    complete=lambda config, fields, keys: config,
    build=lambda config, dtype: GPT2Model(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="transformer.",
    base=("wte", "wpe", "h", "ln_f"),
    dropped=(Dropped(label="mask buffers", pattern=r"h\.\d+\.attn\.(bias|masked_bias)"),),
    ties=(Tie(key="lm_head.weight", equals="wte.weight"),),
    example=lambda config: positioned_example(config.vocab_size, config.max_seq_len),
    probe=probe,
)
