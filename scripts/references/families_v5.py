"""The fixtures of models that only transformers 5 has; `references/families.py` has the others."""

import numpy as np
import torch
import transformers

from .families import Family


def lasr_config() -> transformers.LasrCTCConfig:
    """Returns a LASR of 2 layers x 24 with 6 heads, an even kernel and residual weights of its own.

    The residual weights differ from the defaults and from one another, so that none can stand in
    for another; epsilon is so large that the default in its place shows.
    """
    encoder = transformers.LasrEncoderConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=40,
        conv_kernel_size=8,
        subsampling_conv_channels=20,
        num_mel_bins=16,
        max_position_embeddings=64,
        layer_norm_eps=1e-4,
        feed_forward_residual_weights=[1.25, 0.625],
        conv_residual_weights=[1.75, 0.875],
    )
    return transformers.LasrCTCConfig(
        vocab_size=13, pad_token_id=0, encoder_config=encoder.to_dict()
    )


def lasr_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns 83 and 50 frames of a spectrogram, the second padded on the right: 19 and 10."""
    mask = np.ones((2, 83), np.int32)
    mask[1, 50:] = 0
    mels = generator.normal(size=(2, 83, 16)) * mask[:, :, None]
    return {"input_features": mels.astype(np.float32), "attention_mask": mask}


def lasr_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a LasrForCTC and the LasrEncoder in it."""
    states = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: states.append(output))
        for layer in (model.encoder.subsampler, model.encoder.layers[0])
    ]
    last = model.encoder(**inputs).last_hidden_state
    for hook in hooks:
        hook.remove()
    return {
        "hidden_embedding": states[0],
        "hidden_block_0": states[1],
        "last_hidden_state": last,
        "logits": model(**inputs).logits,
    }


def lasr_mels() -> dict[str, np.ndarray]:
    """Returns audio, and the spectrogram that LASR's feature extractor makes of it."""
    time = np.arange(3000) / 16000
    samples = 0.4 * np.sin(2 * np.pi * (300 + 9000 * time) * time)
    samples += np.random.default_rng(20).normal(0, 0.05, len(time))
    whole = (32767 * samples).astype(np.int16)
    extract = transformers.LasrFeatureExtractor(feature_size=16)
    found = extract((whole / 32768).astype(np.float32), sampling_rate=16000, return_tensors="np")
    return {"samples": whole, "mels": found["input_features"][0]}


FAMILIES = {
    "lasr": Family(
        config=lasr_config,
        model=transformers.LasrForCTC,
        task_classes=(),
        inputs=lasr_inputs,
        values=lasr_values,
        variant=True,
    ),
}
