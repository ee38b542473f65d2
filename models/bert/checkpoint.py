"""BERT's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from flax import nnx
from jaxtyping import Array

from models.bert.config import ARCHITECTURES, MASKED_LM, POOLER, BertConfig
from models.bert.modules import BertModel
from models.hf_config import ConfigFields
from models.keymap import Dropped, Family, Leaf, Tie, embedding, linear, norm
from models.probing import probe

HEAD = "cls.predictions"


def key_map(config: BertConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every parameter, with the names of Hugging Face's files."""
    width, mlp = "hidden_size", "intermediate_size"
    square = partial(linear, outputs=width, inputs=width)
    leaves = [
        embedding(f"embeddings.{name}_embeddings", f"embeddings.{name}", rows=rows, features=width)
        for name, rows in (
            ("word", "vocab_size"),
            ("position", "max_position_embeddings"),
            ("token_type", "type_vocab_size"),
        )
    ]
    leaves += norm("embeddings.LayerNorm", "embeddings.norm", features=width)
    for index in range(config.num_layers):
        theirs, ours = f"encoder.layer.{index}", f"layers.{index}"
        for name in ("query", "key", "value"):
            leaves += square(f"{theirs}.attention.self.{name}", f"{ours}.attention.{name}")
        leaves += square(f"{theirs}.attention.output.dense", f"{ours}.attention.output")
        leaves += norm(
            f"{theirs}.attention.output.LayerNorm", f"{ours}.attention.norm", features=width
        )
        leaves += linear(
            f"{theirs}.intermediate.dense", f"{ours}.mlp.up", outputs=mlp, inputs=width
        )
        leaves += linear(f"{theirs}.output.dense", f"{ours}.mlp.down", outputs=width, inputs=mlp)
        leaves += norm(f"{theirs}.output.LayerNorm", f"{ours}.mlp.norm", features=width)
    if config.pooler:
        leaves += square("pooler.dense", "pooler")
    if config.masked_lm:
        leaves += square(f"{HEAD}.transform.dense", "masked_lm_head.transform")
        leaves += norm(f"{HEAD}.transform.LayerNorm", "masked_lm_head.norm", features=width)
        leaves.append(Leaf(key=f"{HEAD}.bias", path="masked_lm_head.bias", axes=("vocab_size",)))
    return tuple(leaves)


def _complete(config: BertConfig, fields: Mapping[str, object], keys: frozenset[str]) -> BertConfig:
    heads = ARCHITECTURES[ConfigFields(fields).architecture(ARCHITECTURES, "BertModel")]
    pooler, masked_lm = (
        any(key.startswith(f"{part}.") for key in keys) or name in heads
        for part, name in (("pooler", POOLER), (HEAD, MASKED_LM))
    )
    # A head with an embedding of its own is not supported.
    is_tied = bool(BertConfig.schema.value(fields, "tie_word_embeddings"))
    return replace(config, pooler=pooler, masked_lm=masked_lm and is_tied)


def _describe(config: BertConfig) -> str:
    size = f"{config.num_layers} layers x {config.embed_dim}, vocabulary {config.vocab_size:,}"
    size = size if config.pooler else f"{size}, no pooler"
    return f"{size}, masked-LM head" if config.masked_lm else size


def _example(config: BertConfig) -> dict[str, np.ndarray]:
    length = min(16, config.max_seq_len)
    ids = (np.arange(2 * length, dtype=np.int32).reshape(2, length) * 7919 + 13) % config.vocab_size
    mask = np.ones((2, length), np.int32)
    mask[1, (length + 1) // 2 :] = 0
    types = np.zeros((2, length), np.int32)
    types[:, length // 2 :] = config.num_token_types - 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def _probe(model: BertModel, inputs: Mapping[str, Array | np.ndarray]) -> dict[str, Array]:
    values = probe(model, inputs)
    if model.masked_lm_head is not None:
        values["logits"] = model.masked_lm(**inputs)
    return values


FAMILY = Family(
    model_type="bert",
    config=BertConfig,
    schema=BertConfig.schema,
    parse=BertConfig.from_hugging_face,
    complete=_complete,
    build=lambda config, dtype: BertModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=_describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="bert.",
    base=("embeddings", "encoder", "pooler"),
    dropped=(
        Dropped(label="position_ids", pattern=r"embeddings\.position_ids"),
        Dropped(
            label="predictions",
            pattern=r"cls\.predictions\.(bias|decoder\.(weight|bias)"
            r"|transform\.(dense|LayerNorm)\.(weight|bias))",
        ),
        Dropped(label="seq_relationship", pattern=r"cls\.seq_relationship\.(weight|bias)"),
        Dropped(label="classifier", pattern=r"classifier\.(weight|bias)"),
        Dropped(label="qa_outputs", pattern=r"qa_outputs\.(weight|bias)"),
    ),
    ties=(
        Tie(key=f"{HEAD}.decoder.weight", equals="embeddings.word_embeddings.weight"),
        Tie(key=f"{HEAD}.decoder.bias", equals=f"{HEAD}.bias"),
    ),
    example=_example,
    probe=_probe,
)
