"""wav2vec2-conformer's checkpoints: key map, unused tensors, a fixed forward pass."""

from collections.abc import Mapping

import numpy as np
from flax import nnx

from models.conformer.checkpoint import WIDTH, encoder_key_map
from models.keymap import Dropped, Family, Leaf, linear, norm
from models.probing import probe
from models.wav2vec2_conformer.config import Wav2Vec2ConformerConfig, least_samples
from models.wav2vec2_conformer.modules import Wav2Vec2ConformerModel, frame_mask


def key_map(config: Wav2Vec2ConformerConfig) -> tuple[Leaf, ...]:
    """Returns one leaf for every variable, with the names of Hugging Face's files."""
    leaves = [leaf for index in range(len(config.conv_dims)) for leaf in _audio(config, index)]
    leaves += norm("feature_projection.layer_norm", "projection.norm", features="conv_dim")
    leaves += linear(
        "feature_projection.projection", "projection.output", outputs=WIDTH, inputs="conv_dim"
    )
    leaves += encoder_key_map(config, "encoder.", "encoder.")
    if config.vocab_size:
        leaves += linear("lm_head", "head", outputs="vocab_size", inputs=WIDTH)
    return tuple(leaves)


def _audio(config: Wav2Vec2ConformerConfig, index: int) -> list[Leaf]:
    theirs, ours = f"feature_extractor.conv_layers.{index}", f"convolutions.{index}"
    kernel = Leaf(
        key=f"{theirs}.conv.weight",
        path=f"{ours}.kernel",
        axes=("conv_dim", "conv_dim", "conv_kernel"),
        permutation=(2, 1, 0),
    )
    leaves = [kernel]
    if config.conv_bias:
        leaves.append(Leaf(key=f"{theirs}.conv.bias", path=f"{ours}.bias", axes=("conv_dim",)))
    if config.conv_norm == "layer" or index == 0:
        leaves += norm(f"{theirs}.layer_norm", f"{ours}.norm", features="conv_dim")
    return leaves


def _describe(config: Wav2Vec2ConformerConfig) -> str:
    size = f"{config.num_layers} layers x {config.embed_dim}, {config.positions} positions"
    return f"{size}, vocabulary {config.vocab_size:,}" if config.vocab_size else size


def _example(config: Wav2Vec2ConformerConfig) -> dict[str, np.ndarray]:
    frame = least_samples(config)
    time = np.arange(16 * frame, dtype=np.float64)
    audio = np.stack([np.sin(0.05 * time), np.sin(0.3 * np.sqrt(time) * np.sqrt(frame))])
    mask = np.ones(audio.shape, np.int32)
    mask[1, 9 * frame :] = 0
    return {"input_values": (audio * mask).astype(np.float32), "attention_mask": mask}


def _token_mask(
    config: Wav2Vec2ConformerConfig, inputs: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    mask = inputs.get("attention_mask")
    return None if mask is None else np.asarray(frame_mask(config, mask))


FAMILY = Family(
    model_type="wav2vec2-conformer",
    config=Wav2Vec2ConformerConfig,
    schema=Wav2Vec2ConformerConfig.schema,
    parse=Wav2Vec2ConformerConfig.from_hugging_face,
    complete=lambda config, fields, keys: config,
    build=lambda config, dtype: Wav2Vec2ConformerModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
    describe=_describe,
    num_layers=lambda config: config.num_layers,
    leaves=key_map,
    prefix="wav2vec2_conformer.",
    base=("feature_extractor", "feature_projection", "encoder", "masked_spec_embed"),
    dropped=(
        Dropped(
            label="pos_conv_embed",
            pattern=r"encoder\.pos_conv_embed\.conv\."
            r"(bias|weight_[gv]|parametrizations\.weight\.original[01])",
        ),
        Dropped(
            label="num_batches_tracked",
            pattern=r"encoder\.layers\.\d+\.conv_module\.batch_norm\.num_batches_tracked",
        ),
        Dropped(label="inv_freq", pattern=r"encoder\.embed_positions\.inv_freq"),
        Dropped(label="masked_spec_embed", pattern=r"masked_spec_embed"),
        Dropped(label="quantizer", pattern=r"quantizer\.(codevectors|weight_proj\.(weight|bias))"),
        Dropped(label="projection heads", pattern=r"project_(q|hid)\.(weight|bias)"),
    ),
    ties=(),
    example=_example,
    probe=probe,
    token_mask=_token_mask,
)
