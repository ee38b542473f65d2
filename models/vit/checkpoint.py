"""ViT's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from flax import nnx

from models.hf_config import ConfigFields
from models.keymap import Dropped, Family, Leaf, linear, norm
from models.probing import probe
from models.vit.config import ARCHITECTURES, FEATURES, ViTConfig
from models.vit.modules import ViTModel


def key_map(config: ViTConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every parameter, with the names of Hugging Face's files."""
    width, mlp = "hidden_size", "intermediate_size"
    square = partial(linear, outputs=width, inputs=width)
    leaves = [*_embeddings()]
    for index in range(config.num_layers):
        theirs, ours = f"encoder.layer.{index}", f"layers.{index}"
        leaves += norm(f"{theirs}.layernorm_before", f"{ours}.attention.norm", features=width)
        for name in ("query", "key", "value"):
            leaves += square(
                f"{theirs}.attention.attention.{name}",
                f"{ours}.attention.{name}",
                bias=config.qkv_bias,
            )
        leaves += square(f"{theirs}.attention.output.dense", f"{ours}.attention.output")
        leaves += norm(f"{theirs}.layernorm_after", f"{ours}.mlp.norm", features=width)
        leaves += linear(
            f"{theirs}.intermediate.dense", f"{ours}.mlp.up", outputs=mlp, inputs=width
        )
        leaves += linear(f"{theirs}.output.dense", f"{ours}.mlp.down", outputs=width, inputs=mlp)
    leaves += norm("layernorm", "norm", features=width)
    if config.pooler:
        leaves += square("pooler.dense", "pooler")
    if config.num_labels:
        leaves += linear("classifier", "classifier", outputs="id2label", inputs=width)
    return tuple(leaves)


def _embeddings() -> tuple[Leaf, ...]:
    width, projection = "hidden_size", "embeddings.patch_embeddings.projection"
    return (
        Leaf(
            key=f"{projection}.weight",
            path="embeddings.kernel",
            axes=(width, "num_channels", "patch_size", "patch_size"),
            permutation=(2, 3, 1, 0),
        ),
        Leaf(key=f"{projection}.bias", path="embeddings.bias", axes=(width,)),
        Leaf(key="embeddings.cls_token", path="embeddings.cls_token", axes=(width,) * 3),
        Leaf(
            key="embeddings.position_embeddings",
            path="embeddings.position",
            axes=(width, "image_size", width),
        ),
    )


def _complete(config: ViTConfig, fields: Mapping[str, object], keys: frozenset[str]) -> ViTConfig:
    features = ConfigFields(fields).architecture(ARCHITECTURES, FEATURES) == FEATURES
    found = any(key.startswith("pooler.") for key in keys)
    return replace(config, pooler=features and found)


def _describe(config: ViTConfig) -> str:
    size = f"{config.num_layers} layers x {config.embed_dim}"
    image = f"{config.image_size} pixels in patches of {config.patch_size}"
    head = f", {config.num_labels:,} labels" if config.num_labels else ""
    return f"{size}, {image}{head}"


def _example(config: ViTConfig) -> dict[str, np.ndarray]:
    shape = (2, config.num_channels, config.image_size, config.image_size)
    steps = np.arange(np.prod(shape), dtype=np.int64) * 7919 % 255
    return {"pixel_values": (steps.reshape(shape) / 127.5 - 1).astype(np.float32)}


FAMILY = Family(
    model_type="vit",
    config=ViTConfig,
    schema=ViTConfig.schema,
    parse=ViTConfig.from_hugging_face,
    complete=_complete,
    build=lambda config, dtype: ViTModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=_describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="vit.",
    base=("embeddings", "encoder", "layernorm", "pooler"),
    # A pooler is dropped only for classes without use for one.
    dropped=(Dropped(label="pooler", pattern=r"pooler\.dense\.(weight|bias)"),),
    ties=(),
    example=_example,
    probe=probe,
)
