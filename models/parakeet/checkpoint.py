"""Parakeet's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from flax import nnx

from models.keymap import Dropped, Family, Leaf, batch_norm, linear, norm, pointwise
from models.parakeet.config import ParakeetConfig
from models.parakeet.modules import ParakeetModel, frame_mask
from models.probing import probe

WIDTH, MLP = "encoder_config.hidden_size", "encoder_config.intermediate_size"
CHANNELS = "encoder_config.subsampling_conv_channels"
square = partial(linear, outputs=WIDTH, inputs=WIDTH)


def key_map(config: ParakeetConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every variable, with the names of Hugging Face's files."""
    leaves = _subsampling(config)
    for index in range(config.num_layers):
        leaves += _block(config, f"layers.{index}", f"encoder.layers.{index}")
    if config.vocab_size:
        leaves += pointwise("ctc_head", "head", outputs="vocab_size", inputs=WIDTH, bias=True)
    return tuple(leaves)


def _subsampling(config: ParakeetConfig) -> list[Leaf]:
    kernel = "encoder_config.subsampling_conv_kernel_size"
    leaves = [*linear("subsampling.linear", "subsampling.output", outputs=WIDTH, inputs=CHANNELS)]
    for index in range(config.num_convolutions):
        # Between them stand pointwise convolutions and ReLUs, which count as layers too.
        layer = f"subsampling.layers.{3 * index - 1 if index else 0}"
        strided = f"subsampling.strided.{index}"
        weight = Leaf(
            key=f"{layer}.weight",
            path=f"{strided}.kernel",
            axes=(CHANNELS, CHANNELS, kernel, kernel),
            permutation=(2, 3, 1, 0),
        )
        leaves += [weight, Leaf(key=f"{layer}.bias", path=f"{strided}.bias", axes=(CHANNELS,))]
        if index:
            leaves += pointwise(
                f"subsampling.layers.{3 * index}",
                f"subsampling.pointwise.{index - 1}",
                outputs=CHANNELS,
                inputs=CHANNELS,
                bias=True,
                num_axes=2,
            )
    return leaves


def _block(config: ParakeetConfig, theirs: str, ours: str) -> list[Leaf]:
    leaves = [*norm(f"{theirs}.norm_out", f"{ours}.norm", features=WIDTH)]
    for number, name in ((1, "mlp_before"), (2, "mlp_after")):
        mlp, feed_forward = f"{ours}.{name}", f"{theirs}.feed_forward{number}"
        leaves += norm(f"{theirs}.norm_feed_forward{number}", f"{mlp}.norm", features=WIDTH)
        up, down = (partial(linear, f"{feed_forward}.linear{n}", bias=config.bias) for n in (1, 2))
        leaves += up(f"{mlp}.up", outputs=MLP, inputs=WIDTH)
        leaves += down(f"{mlp}.down", outputs=WIDTH, inputs=MLP)
    leaves += norm(f"{theirs}.norm_self_att", f"{ours}.attention.norm", features=WIDTH)
    leaves += _attention(config, f"{theirs}.self_attn", f"{ours}.attention")
    leaves += norm(f"{theirs}.norm_conv", f"{ours}.convolution.norm", features=WIDTH)
    return leaves + _convolution(config, f"{theirs}.conv", f"{ours}.convolution")


def _attention(config: ParakeetConfig, theirs: str, ours: str) -> list[Leaf]:
    names = {"q": "query", "k": "key", "v": "value", "o": "output"}
    leaves = []
    for their_name, our_name in names.items():
        leaves += square(f"{theirs}.{their_name}_proj", f"{ours}.{our_name}", bias=config.bias)
    leaves += square(f"{theirs}.relative_k_proj", f"{ours}.position", bias=False)
    axes = ("encoder_config.num_attention_heads", WIDTH)
    for letter, name in (("u", "content"), ("v", "position")):
        leaves.append(Leaf(key=f"{theirs}.bias_{letter}", path=f"{ours}.{name}_bias", axes=axes))
    return leaves


def _convolution(config: ParakeetConfig, theirs: str, ours: str) -> list[Leaf]:
    bias, depthwise = config.convolution_bias, f"{theirs}.depthwise_conv"
    around = partial(pointwise, outputs=WIDTH, inputs=WIDTH, bias=bias)
    weight = Leaf(
        key=f"{depthwise}.weight",
        path=f"{ours}.depthwise",
        axes=(WIDTH, WIDTH, "encoder_config.conv_kernel_size"),
        permutation=(2, 1, 0),
    )
    leaves = [weight, *batch_norm(f"{theirs}.norm", f"{ours}.batch_norm", features=WIDTH)]
    if bias:
        path = f"{ours}.depthwise_bias"
        leaves.append(Leaf(key=f"{depthwise}.bias", path=path, axes=(WIDTH,)))
    leaves += around(f"{theirs}.pointwise_conv1", f"{ours}.gated")
    leaves += around(f"{theirs}.pointwise_conv2", f"{ours}.output")
    return leaves


def _describe(config: ParakeetConfig) -> str:
    size = f"{config.num_layers} layers x {config.embed_dim}, {config.num_mels} mel bins"
    return f"{size}, vocabulary {config.vocab_size:,}" if config.vocab_size else size


def _example(config: ParakeetConfig) -> dict[str, np.ndarray]:
    shape = (2, 16 * config.subsampling_stride**config.num_convolutions, config.num_mels)
    steps = np.arange(np.prod(shape), dtype=np.int64) * 7919 % 255
    mask = np.ones(shape[:2], np.int32)
    mask[1, shape[1] // 2 :] = 0
    mels = (steps.reshape(shape) / 127.5 - 1) * mask[:, :, None]
    return {"input_features": mels.astype(np.float32), "attention_mask": mask}


def _token_mask(config: ParakeetConfig, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    mask = inputs.get("attention_mask")
    return None if mask is None else np.asarray(frame_mask(config, mask))


# This also serves an encoder alone, model_type parakeet_encoder, whose files lack the prefix.
FAMILY = Family(
    model_type="parakeet_ctc",
    config=ParakeetConfig,
    schema=ParakeetConfig.schema,
    parse=ParakeetConfig.from_hugging_face,
    complete=lambda config, fields, keys: config,
    build=lambda config, dtype: ParakeetModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=_describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="encoder.",
    base=("subsampling", "layers"),
    dropped=(
        Dropped(
            label="num_batches_tracked", pattern=r"layers\.\d+\.conv\.norm\.num_batches_tracked"
        ),
    ),
    ties=(),
    example=_example,
    probe=probe,
    token_mask=_token_mask,
)
