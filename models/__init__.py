"""Transformer families as Flax nnx modules, loaded from Hugging Face folders.

Names are imported on first use, so that `import models` alone loads neither jax nor flax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.bert import BertModel, BertOutput
    from models.bert_config import BertConfig
    from models.bloom import BloomConfig, BloomModel
    from models.checkpoint import load, load_parameters, load_tokenizer
    from models.companions import (
        load_labels,
        load_preprocessor,
        load_stop_tokens,
        load_vocabulary,
    )
    from models.conformer import ConformerEncoder, ConformerOutput
    from models.conformer_config import ConformerConfig
    from models.conversion import ConversionReport, convert
    from models.errors import (
        CheckpointError,
        CheckpointWarning,
        ConfigError,
        InputError,
        KeyMismatchError,
        NumericError,
    )
    from models.gpt2 import GPT2Config, GPT2Model
    from models.kernels import Kernels, with_kernels
    from models.lasr import LasrModel
    from models.lasr_config import LasrConfig
    from models.layers import CausalOutput
    from models.llama import LlamaConfig, LlamaModel
    from models.parakeet import ParakeetConfig, ParakeetModel
    from models.vit import ViTConfig, ViTModel, ViTOutput
    from models.wav2vec2_conformer import Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

# model_type of config.json -> the module whose FAMILY has configuration, modules and key map.
FAMILIES = {
    "bert": "models.bert_checkpoint",
    "bloom": "models.bloom_checkpoint",
    "gpt2": "models.gpt2_checkpoint",
    "lasr_ctc": "models.lasr_checkpoint",
    "lasr_encoder": "models.lasr_checkpoint",
    "llama": "models.llama_checkpoint",
    "parakeet_ctc": "models.parakeet_checkpoint",
    "parakeet_encoder": "models.parakeet_checkpoint",
    "vit": "models.vit_checkpoint",
    "wav2vec2-conformer": "models.conformer_checkpoint",
}

_MODULES = {
    "BertConfig": "bert_config",
    "BertModel": "bert",
    "BertOutput": "bert",
    "BloomConfig": "bloom",
    "BloomModel": "bloom",
    "CausalOutput": "layers",
    "CheckpointError": "errors",
    "CheckpointWarning": "errors",
    "ConfigError": "errors",
    "ConformerConfig": "conformer_config",
    "ConformerEncoder": "conformer",
    "ConformerOutput": "conformer",
    "ConversionReport": "conversion",
    "GPT2Config": "gpt2",
    "GPT2Model": "gpt2",
    "InputError": "errors",
    "KeyMismatchError": "errors",
    "Kernels": "kernels",
    "LasrConfig": "lasr_config",
    "LasrModel": "lasr",
    "LlamaConfig": "llama",
    "LlamaModel": "llama",
    "NumericError": "errors",
    "ParakeetConfig": "parakeet",
    "ParakeetModel": "parakeet",
    "ViTConfig": "vit",
    "ViTModel": "vit",
    "ViTOutput": "vit",
    "Wav2Vec2ConformerConfig": "wav2vec2_conformer",
    "Wav2Vec2ConformerModel": "wav2vec2_conformer",
    "convert": "conversion",
    "load": "checkpoint",
    "load_labels": "companions",
    "load_parameters": "checkpoint",
    "load_preprocessor": "companions",
    "load_stop_tokens": "companions",
    "load_tokenizer": "checkpoint",
    "load_vocabulary": "companions",
    "with_kernels": "kernels",
}

__all__ = [
    "FAMILIES",
    "BertConfig",
    "BertModel",
    "BertOutput",
    "BloomConfig",
    "BloomModel",
    "CausalOutput",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "ConformerConfig",
    "ConformerEncoder",
    "ConformerOutput",
    "ConversionReport",
    "GPT2Config",
    "GPT2Model",
    "InputError",
    "Kernels",
    "KeyMismatchError",
    "LasrConfig",
    "LasrModel",
    "LlamaConfig",
    "LlamaModel",
    "NumericError",
    "ParakeetConfig",
    "ParakeetModel",
    "ViTConfig",
    "ViTModel",
    "ViTOutput",
    "Wav2Vec2ConformerConfig",
    "Wav2Vec2ConformerModel",
    "convert",
    "load",
    "load_labels",
    "load_parameters",
    "load_preprocessor",
    "load_stop_tokens",
    "load_tokenizer",
    "load_vocabulary",
    "with_kernels",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"models.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
