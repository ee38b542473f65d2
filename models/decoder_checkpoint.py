"""The description and the example inputs that the checkpoints of all causal decoders share."""

import numpy as np

from models.decoder import DecoderConfig


def describe(config: DecoderConfig, extra: str = "") -> str:
    """Returns one line for the report; `extra` is a family's own addition."""
    size = f"{config.num_layers} layers x {config.embed_dim}, vocabulary {config.vocab_size:,}"
    return f"{size}{extra}" if config.lm_head else f"{size}{extra}, no head"


def example(vocab_size: int, length: int) -> dict[str, np.ndarray]:
    """Returns two fixed sequences; the first half of the second is padding."""
    ids = (np.arange(2 * length, dtype=np.int32).reshape(2, length) * 7919 + 13) % vocab_size
    mask = np.ones((2, length), np.int32)
    mask[1, : length // 2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def positioned_example(vocab_size: int, max_seq_len: int) -> dict[str, np.ndarray]:
    """Returns the example of a family with positions, which count from the first real token."""
    inputs = example(vocab_size, min(16, max_seq_len))
    positions = np.maximum(inputs["attention_mask"].cumsum(1) - 1, 0).astype(np.int32)
    return inputs | {"position_ids": positions}
