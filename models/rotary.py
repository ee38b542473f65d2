"""Rotary positions in the layout of Hugging Face's files, pairs (i, i + H/2); llama3's scaling.

Not here: the interleaved layout of Meta's own files, pair (2i, 2i + 1), and other scalings.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.hf_config import ConfigFields
from models.layers import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The frequencies of rotary positions, with llama3's scaling.

    Attributes:
      theta: Base of the frequencies.
      factor: The divisor of low frequencies; 1 leaves all as they are.
      low: Wavelengths above original_len / low are divided in full.
      high: Wavelengths below original_len / high are kept; those between are blended.
      original_len: The longest sequence before scaling.
    """

    theta: float
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """Cosine and sine of the rotation angle of each pair of features at each position."""

    cos: Float[Array, "#B T 1 half"]
    sin: Float[Array, "#B T 1 half"]

    def rotate(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Rotates the pairs (i, i + H/2) of every head, in f32."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = (
            first * self.cos - second * self.sin,
            second * self.cos + first * self.sin,
        )
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotary_frequencies(rotary: Rotary, head_dim: int) -> Float[np.ndarray, " half"]:
    """Returns the angle per position of each pair of features: theta ** (-2i / head_dim), scaled.

    Source: Su et al. 2021, section 3.2; the scaling is that of LLaMA 3.1's released code.
    """
    # Every step is rounded to f32 as in Hugging Face's code: the last bit of a frequency, times
    # position 100,000, changes the logits by a hundredth of their deviation.
    exponents = np.arange(0, head_dim, 2) / head_dim
    frequencies = np.float32(1) / np.power(rotary.theta, exponents).astype(np.float32)
    turns = rotary.original_len * frequencies / (2 * np.pi)
    kept = np.clip((turns - rotary.low) / (rotary.high - rotary.low), 0, 1)
    return (1 - kept) * frequencies / rotary.factor + kept * frequencies


def rotary_table(
    frequencies: Float[np.ndarray, " half"], length: int, position_ids: Ids | None
) -> RotaryTable:
    """Returns the table of given positions, or of 0, 1, 2 and so on, in f32."""
    with jax.named_scope("rotary_table"):
        ids = jnp.arange(length)[None] if position_ids is None else jnp.asarray(position_ids)
        angles = ids.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
        return RotaryTable(cos=jnp.cos(angles), sin=jnp.sin(angles))


def read_rotary(reader: ConfigFields) -> Rotary:
    """Reads rope_theta and rope_scaling of transformers 4, or rope_parameters of transformers 5.

    Raises:
      ConfigError: A field is missing, malformed or unsupported, or the two forms differ.
    """
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    reader.ignore("rope_theta")
    given = [part for part in (new, reader) if part is not None and part.has("rope_theta")]
    thetas = [part.positive("rope_theta") for part in given or [reader]]
    if thetas[0] != thetas[-1]:
        raise reader.error("rope_theta", "not that of rope_parameters", "one is meant", "remove it")
    rotary = _scaled(thetas[0], old if new is None else new)
    if old is not None and _scaled(thetas[0], old) != rotary:
        found = "not that of rope_parameters"
        raise reader.error("rope_scaling", found, "one is meant", "remove it")
    return rotary


def _scaled(theta: float, section: ConfigFields | None) -> Rotary:
    if section is None:
        return Rotary(theta=theta)
    section.exactly("partial_rotary_factor", (1.0, 1, None), default=None)
    kinds = {"default": "default", "llama3": "llama3"}
    older = section.one_of("type", kinds, "default")
    kind = section.one_of("rope_type", kinds, older)
    if section.has("type") and kind != older:
        raise section.error("type", older, f"rope_type is {kind} and means the same", "correct it")
    rotary = Rotary(theta=theta)
    if kind == "llama3":
        rotary = Rotary(
            theta=theta,
            factor=section.positive("factor"),
            low=section.positive("low_freq_factor"),
            high=section.positive("high_freq_factor"),
            original_len=section.count("original_max_position_embeddings"),
        )
    return rotary
