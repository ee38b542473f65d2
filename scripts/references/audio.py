"""The tiny Hugging Face models of audio that `make_reference.py` makes fixtures of."""

import numpy as np
import torch
import transformers

from .families import Family


def conformer_config() -> transformers.Wav2Vec2ConformerConfig:
    """Returns a Conformer of 2 layers x 24, relative positions, a LayerNorm on every conv."""
    return transformers.Wav2Vec2ConformerConfig(
        vocab_size=13,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=40,
        hidden_act="swish",
        conv_dim=(12, 16, 20),
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 2, 2),
        conv_bias=True,
        feat_extract_norm="layer",
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_codevectors_per_group=4,
        codevector_dim=8,
        proj_codevector_dim=8,
        conv_depthwise_kernel_size=7,
        position_embeddings_type="relative",
        pad_token_id=3,
    )


def conformer_rotary_config() -> transformers.Wav2Vec2ConformerConfig:
    """Returns a Conformer with rotary positions, GELU, and a norm on the first conv alone."""
    config = conformer_config()
    config.position_embeddings_type = "rotary"
    config.hidden_act = "gelu"
    config.conv_bias = False
    config.feat_extract_norm = "group"
    return config


def conformer_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns 400 and 250 samples, the second padded on the right: 19 and 12 frames."""
    mask = np.ones((2, 400), np.int32)
    mask[1, 250:] = 0
    audio = generator.normal(size=(2, 400)).astype(np.float32) * mask
    return {"input_values": audio, "attention_mask": mask}


def conformer_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a Wav2Vec2ConformerForCTC and the Wav2Vec2ConformerModel in it."""
    values = conformer_features_values(model.wav2vec2_conformer, inputs)
    return values | {"logits": model(**inputs).logits}


def conformer_features_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a Wav2Vec2ConformerModel."""
    output = model(**inputs, output_hidden_states=True)
    return {
        "hidden_embedding": output.hidden_states[0],
        "hidden_block_0": output.hidden_states[1],
        "last_hidden_state": output.last_hidden_state,
    }


def parakeet_config() -> transformers.ParakeetCTCConfig:
    """Returns a Parakeet of 2 layers x 24 on 24 mel bins, its length cut to an eighth."""
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=40,
        conv_kernel_size=5,
        subsampling_factor=8,
        subsampling_conv_channels=6,
        num_mel_bins=24,
        max_position_embeddings=32,
    )
    return transformers.ParakeetCTCConfig(
        vocab_size=13, pad_token_id=12, encoder_config=encoder.to_dict()
    )


def parakeet_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns 83 and 50 frames of a spectrogram, the second padded on the right: 11 and 7."""
    mask = np.ones((2, 83), np.int32)
    mask[1, 50:] = 0
    mels = generator.normal(size=(2, 83, 24)) * mask[:, :, None]
    return {"input_features": mels.astype(np.float32), "attention_mask": mask}


def parakeet_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a ParakeetForCTC; what the subsampling gives is scaled as the encoder scales it."""
    states = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: states.append(output))
        for layer in (model.encoder.subsampling, model.encoder.layers[0])
    ]
    last = model.encoder(**inputs).last_hidden_state
    for hook in hooks:
        hook.remove()
    return {
        "hidden_embedding": states[0] * model.encoder.input_scale,
        "hidden_block_0": states[1],
        "last_hidden_state": last,
        "logits": model(**inputs).logits,
    }


FAMILIES = {
    "conformer": Family(
        config=conformer_config,
        model=transformers.Wav2Vec2ConformerForCTC,
        task_classes=(
            transformers.Wav2Vec2ConformerModel,
            transformers.Wav2Vec2ConformerForPreTraining,
        ),
        inputs=conformer_inputs,
        values=conformer_values,
        default_scale=False,
    ),
    "conformer_rotary": Family(
        config=conformer_rotary_config,
        model=transformers.Wav2Vec2ConformerModel,
        task_classes=(),
        inputs=conformer_inputs,
        values=conformer_features_values,
        variant=True,
    ),
    "parakeet": Family(
        config=parakeet_config,
        model=transformers.ParakeetForCTC,
        task_classes=(),
        inputs=parakeet_inputs,
        values=parakeet_values,
        variant=True,
    ),
}
