"""LASR's checkpoints: key map, unused tensors, a fixed forward pass for checks."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from flax import nnx

from models.keymap import Dropped, Family, Leaf, batch_norm, linear, pointwise, scale_norm
from models.lasr.config import NUM_CONVOLUTIONS, LasrConfig, least_frames
from models.lasr.modules import LasrModel, frame_mask
from models.probing import probe

WIDTH, MLP = "encoder_config.hidden_size", "encoder_config.intermediate_size"
CHANNELS = "encoder_config.subsampling_conv_channels"
square = partial(linear, outputs=WIDTH, inputs=WIDTH)
scale = partial(scale_norm, features=WIDTH)


def key_map(config: LasrConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every variable, with the names of Hugging Face's files."""
    leaves = [*_subsampling(), scale("out_norm", "norm")]
    for index in range(config.num_layers):
        leaves += _block(config, f"layers.{index}")
    if config.vocab_size:
        leaves += pointwise("ctc_head", "head", outputs="vocab_size", inputs=WIDTH, bias=True)
    return tuple(leaves)


def _subsampling() -> list[Leaf]:
    mels, kernel = "encoder_config.num_mel_bins", "encoder_config.subsampling_conv_kernel_size"
    leaves = [*linear("subsampler.dense_0", "subsampling.input", outputs=WIDTH, inputs=mels)]
    leaves += linear("subsampler.dense_1", "subsampling.output", outputs=WIDTH, inputs=CHANNELS)
    for index in range(NUM_CONVOLUTIONS):
        theirs, ours = f"subsampler.conv_{index}", f"subsampling.strided.{index}"
        outputs = CHANNELS if index == NUM_CONVOLUTIONS - 1 else WIDTH
        weight = Leaf(
            key=f"{theirs}.weight",
            path=f"{ours}.kernel",
            axes=(outputs, WIDTH, kernel),
            permutation=(2, 1, 0),
        )
        leaves += [weight, Leaf(key=f"{theirs}.bias", path=f"{ours}.bias", axes=(outputs,))]
    return leaves


def _block(config: LasrConfig, name: str) -> list[Leaf]:
    leaves = [scale(f"{name}.norm_out", f"{name}.norm")]
    for number, which in ((1, "before"), (2, "after")):
        theirs, ours = f"{name}.feed_forward{number}", f"{name}.mlp_{which}"
        leaves.append(scale(f"{name}.norm_feed_forward{number}", f"{ours}.norm"))
        up, down = (partial(linear, f"{theirs}.linear{n}", bias=config.bias) for n in (1, 2))
        leaves += up(f"{ours}.up", outputs=MLP, inputs=WIDTH)
        leaves += down(f"{ours}.down", outputs=WIDTH, inputs=MLP)
    leaves.append(scale(f"{name}.norm_self_att", f"{name}.attention.norm"))
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
        projection = f"{name}.self_attn.{theirs}_proj"
        leaves += square(projection, f"{name}.attention.{ours}", bias=config.bias)
    leaves.append(scale(f"{name}.norm_conv", f"{name}.convolution.norm"))
    return leaves + _convolution(config, f"{name}.conv", f"{name}.convolution")


def _convolution(config: LasrConfig, theirs: str, ours: str) -> list[Leaf]:
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


def _describe(config: LasrConfig) -> str:
    size = f"{config.num_layers} layers x {config.embed_dim}, {config.num_mels} mel bins"
    return f"{size}, vocabulary {config.vocab_size:,}" if config.vocab_size else size


def _example(config: LasrConfig) -> dict[str, np.ndarray]:
    least = least_frames(config)
    shape = (2, 8 * least, config.num_mels)
    steps = np.arange(np.prod(shape), dtype=np.int64) * 7919 % 255
    mask = np.ones(shape[:2], np.int32)
    mask[1, 5 * least :] = 0
    mels = (steps.reshape(shape) / 127.5 - 1) * mask[:, :, None]
    return {"input_features": mels.astype(np.float32), "attention_mask": mask}


def _token_mask(config: LasrConfig, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    mask = inputs.get("attention_mask")
    return None if mask is None else np.asarray(frame_mask(config, mask))


# This also serves an encoder alone, model_type lasr_encoder, whose files lack the prefix.
FAMILY = Family(
    model_type="lasr_ctc",
    config=LasrConfig,
    schema=LasrConfig.schema,
    parse=LasrConfig.from_hugging_face,
    complete=lambda config, fields, keys: config,
    build=lambda config, dtype: LasrModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=_describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="encoder.",
    base=("subsampler", "layers", "out_norm"),
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
