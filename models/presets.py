"""Models by name or by their config.json, as shapes: no weights are read or made.

`pbjax roofline` uses them to look at a model without running it. The phases of a model are
"prefill" and "decode" if it keeps a KV cache, "forward" otherwise.
"""

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from models import FAMILIES
from models.checkpoint import find_family
from models.conformer.config import ConformerConfig
from models.conformer.modules import ConformerEncoder
from models.decoder import CausalDecoder
from models.errors import CheckpointError, InputError
from models.example_values import fill_inputs, fill_module
from models.hf_folder import find_folder, read_json
from models.kernels import with_kernels
from models.keymap import Family
from models.orbax_folder import is_ours, parse_config, parse_manifest
from models.parameters import canonical_dtype

# The version assumed where cuDNN is not installed: 9.13, recent enough for everything JAX checks.
CUDNN_VERSION = 91300

# The model_type of the family and the constructor of the configuration, by name.
PRESETS = {
    "bert-base": ("bert", "base"),
    "bert-large": ("bert", "large"),
    "bloom-1b1": ("bloom", "bloom_1b1"),
    "bloom-1b7": ("bloom", "bloom_1b7"),
    "bloom-3b": ("bloom", "bloom_3b"),
    "bloom-560m": ("bloom", "bloom_560m"),
    "bloom-7b1": ("bloom", "bloom_7b1"),
    "conformer-l": ("conformer", "conformer_l"),
    "conformer-large": ("wav2vec2-conformer", "large"),
    "conformer-large-rotary": ("wav2vec2-conformer", "large_rotary"),
    "gpt2": ("gpt2", "small"),
    "gpt2-large": ("gpt2", "large"),
    "gpt2-medium": ("gpt2", "medium"),
    "gpt2-xl": ("gpt2", "xl"),
    "lasr-ctc": ("lasr_ctc", "ctc"),
    "llama3-70b": ("llama", "llama3_70b"),
    "llama3-8b": ("llama", "llama3_8b"),
    "llama3.1-70b": ("llama", "llama31_70b"),
    "llama3.1-8b": ("llama", "llama31_8b"),
    "llama3.2-1b": ("llama", "llama32_1b"),
    "llama3.2-3b": ("llama", "llama32_3b"),
    "minilm": ("bert", "minilm"),
    "parakeet-ctc-0.6b": ("parakeet_ctc", "ctc_0_6b"),
    "parakeet-ctc-1.1b": ("parakeet_ctc", "ctc_1_1b"),
    "vit-base": ("vit", "base"),
    "vit-large": ("vit", "large"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The shapes of one call of a model.

    Attributes:
      function: The module, or one of its methods.
      inputs: The shapes and dtypes of its inputs.
      cache: The indices of the inputs that hold a KV cache.
      tokens: The number of input tokens of all rows together; 0 for images and audio.
      cached: In "decode", the number of tokens of a row in the cache, the new ones included.
    """

    function: nnx.Module | Callable
    inputs: tuple[object, ...]
    cache: tuple[int, ...]
    tokens: int
    cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model without its weights.

    Attributes:
      name: The preset or folder that was asked for.
      family: The family of the model.
      config: The sizes of the model.
      module: The module, with shapes and dtypes in place of weights.
    """

    name: str
    family: Family
    config: object
    module: nnx.Module

    def without_head(self) -> "ModelShape":
        """The model without its language model head, if it has one."""
        if not getattr(self.config, "lm_head", False):
            return self
        config: Any = self.config
        return self._rebuilt(replace(config, lm_head=False))

    def with_layers(self, num_layers: int) -> "ModelShape":
        """The model with another number of layers."""
        return self._rebuilt(_with_layers(self.config, num_layers))

    def _rebuilt(self, config: object) -> "ModelShape":
        dtype = str(jax.tree.leaves(nnx.state(self.module))[0].dtype)
        module = nnx.eval_shape(lambda: self.family.build(config, dtype))
        return replace(self, config=config, module=module)

    def calling_kernels(self) -> "ModelShape":
        """The model whose layers call the kernels of the device that programs are traced for."""
        return replace(self, module=nnx.eval_shape(with_kernels, self.module))

    def filled(self) -> "ModelShape":
        """The model with random weights, whose layers call the kernels of this device."""
        return replace(self, module=with_kernels(fill_module(self.module)))

    def values(self, call: Call) -> tuple[object, ...]:
        """Random inputs of a call."""
        return fill_inputs(call.inputs, getattr(self.config, "vocab_size", 1))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that the model supports."""
        has_head = getattr(self.config, "lm_head", False)
        generates = isinstance(self.module, CausalDecoder) and has_head
        return ("prefill", "decode") if generates else ("forward",)

    def call(self, phase: str, batch_size: int, seq_len: int | None, new_tokens: int = 1) -> Call:
        """Returns a call of the model.

        Args:
          phase: One of `phases`, or "forward", which every model has.
          batch_size: The number of rows.
          seq_len: Tokens of a row, samples of audio, or frames of a spectrogram; in "decode" the
            tokens in the cache, the new ones included; None for images, which have one size.
          new_tokens: New tokens of a row in "decode"; speculative decoding checks several at once.

        Raises:
          InputError: The model does not support the phase or the length.
        """
        if phase not in (*self.phases, "forward"):
            raise InputError(
                f"{self.name}: unknown phase {phase!r}; phases are"
                f" {', '.join(dict.fromkeys((*self.phases, 'forward')))}; choose one"
            )
        if phase == "forward" or not isinstance(self.module, CausalDecoder):
            return self._forward(batch_size, seq_len)
        decoder, length = self.module, self._length(seq_len)
        cache = nnx.eval_shape(lambda: decoder.empty_cache(batch_size, length))
        num_tokens = length if phase == "prefill" else new_tokens
        ids = jax.ShapeDtypeStruct((batch_size, num_tokens), jnp.int32)
        tokens = batch_size * num_tokens
        if phase == "decode":
            inputs = (ids, cache)
            return Call(
                function=decoder.decode, inputs=inputs, cache=(1,), tokens=tokens, cached=length
            )
        lengths = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        inputs = (ids, lengths, cache)
        return Call(function=decoder.prefill, inputs=inputs, cache=(2,), tokens=tokens)

    def _length(self, seq_len: int | None) -> int:
        longest = getattr(self.config, "max_seq_len", None)
        if seq_len is None or seq_len < 1 or (longest is not None and seq_len > longest):
            possible = "1 or more" if longest is None else f"1 to {longest}"
            found = "missing" if seq_len is None else seq_len
            raise InputError(
                f"{self.name}: seq is {found}; {possible} is possible; pass a length in that range"
            )
        return seq_len

    def _forward(self, batch_size: int, seq_len: int | None) -> Call:
        """Returns a call with the resized example of the family."""
        value = next(iter(self.family.example(self.config).values()))
        patches = getattr(self.config, "num_patches", None)
        if patches is not None and seq_len is not None:
            raise InputError(
                f"{self.name}: seq is {seq_len}; an image has {patches} patches; leave it out"
            )
        length = self._length(seq_len) if patches is None else value.shape[1]
        shape = (batch_size, length, *value.shape[2:])
        inputs = (jax.ShapeDtypeStruct(shape, value.dtype),)
        is_text = jnp.issubdtype(value.dtype, jnp.integer)
        tokens = batch_size * length if is_text else 0
        return Call(function=self.module, inputs=inputs, cache=(), tokens=tokens)


@contextmanager
def traced_for(device_kind: str, num_sms: int) -> Generator[None]:
    """Traces programs inside the context for a device that may be absent.

    Args:
      device_kind: The name of the device in JAX.
      num_sms: The number of its streaming multiprocessors.
    """
    if device_kind == "cpu":
        yield
        return
    device = AbstractDevice(device_kind, num_sms, "cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), _cudnn_assumed():
        yield


@contextmanager
def _cudnn_assumed() -> Generator[None]:
    """Allows attention by cuDNN to be traced where the library is not installed.

    JAX checks only its version before a program is lowered.
    """
    given = fused_attention_stablehlo.check_cudnn_version
    if fused_attention_stablehlo.cuda_versions is None:
        fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN_VERSION
    try:
        yield
    finally:
        fused_attention_stablehlo.check_cudnn_version = given


def find_shape(source: str, dtype: str = "bfloat16", num_layers: int | None = None) -> ModelShape:
    """Returns a model by the name of a preset, or by a folder with its config.json.

    Args:
      source: A name in PRESETS, or a folder in Hugging Face's or our format, even without weights.
      dtype: The dtype of weights and activations.
      num_layers: The number of layers; None = the configuration's.

    Raises:
      CheckpointError: The source is neither, or its configuration is not supported.
    """
    canonical_dtype(dtype, f"{source}")
    if source in PRESETS:
        model_type, constructor = PRESETS[source]
        family = _family(model_type)
        config = getattr(family.config, constructor)()
    else:
        family, config = _from_folder(Path(source))
    if num_layers is not None:
        config = _with_layers(config, num_layers)
    module = nnx.eval_shape(lambda: family.build(config, dtype))
    return ModelShape(name=source, family=family, config=config, module=module)


def _family(model_type: str) -> Family:
    if model_type != "conformer":
        return importlib.import_module(FAMILIES[model_type]).FAMILY
    # The bare encoder of Gulati et al. has no checkpoints: it takes frames, not audio.
    return replace(
        importlib.import_module(FAMILIES["wav2vec2-conformer"]).FAMILY,
        model_type=model_type,
        config=ConformerConfig,
        build=lambda config, dtype: ConformerEncoder(config, dtype=dtype, rngs=nnx.Rngs(0)),
        example=lambda config: {"hidden_states": np.zeros((2, 16, config.embed_dim), np.float32)},
    )


def _with_layers(config: Any, num_layers: int) -> object:
    return replace(config, num_layers=num_layers)


def _from_folder(path: Path) -> tuple[Family, object]:
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such folder or preset; presets are {', '.join(PRESETS)}; give one of them"
            " or a folder with a config.json"
        )
    find_folder(path)
    fields = read_json(path / "config.json")
    origin = f"{path}/config.json"
    if is_ours(fields):
        manifest = parse_manifest(fields, origin)
        family = find_family(fields, path)
        return family, parse_config(family, manifest, origin)
    family = find_family(fields, path)
    return family, family.parse(fields, origin)
