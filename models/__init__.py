"""Transformer families as Flax nnx modules, loaded from Hugging Face folders.

Names are imported on first use, so that `import models` alone loads neither jax nor flax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.bert.config import BertConfig
    from models.bert.modules import BertModel, BertOutput
    from models.bloom.config import BloomConfig
    from models.bloom.modules import BloomModel
    from models.chat import ChatTemplate, load_chat_template
    from models.checkpoint import load, load_parameters, load_tokenizer
    from models.companions import (
        load_labels,
        load_preprocessor,
        load_stop_tokens,
        load_vocabulary,
    )
    from models.conformer.config import ConformerConfig
    from models.conformer.modules import ConformerEncoder, ConformerOutput
    from models.conversion import ConversionReport, convert
    from models.errors import (
        CheckpointError,
        CheckpointWarning,
        ConfigError,
        InputError,
        KeyMismatchError,
        NumericError,
    )
    from models.gpt2.config import GPT2Config
    from models.gpt2.modules import GPT2Model
    from models.kernels import Kernels, with_kernels
    from models.lasr.config import LasrConfig
    from models.lasr.modules import LasrModel
    from models.layers import CausalOutput
    from models.llama.config import LlamaConfig
    from models.llama.modules import LlamaModel
    from models.parakeet.config import ParakeetConfig
    from models.parakeet.modules import ParakeetModel
    from models.sentence_settings import SentenceSettings, load_sentence_settings
    from models.vit.config import ViTConfig
    from models.vit.modules import ViTModel, ViTOutput
    from models.wav2vec2_conformer.config import Wav2Vec2ConformerConfig
    from models.wav2vec2_conformer.modules import Wav2Vec2ConformerModel

# model_type of config.json -> the module whose FAMILY has configuration, modules and key map.
FAMILIES = {
    "bert": "models.bert.checkpoint",
    "bloom": "models.bloom.checkpoint",
    "gpt2": "models.gpt2.checkpoint",
    "lasr_ctc": "models.lasr.checkpoint",
    "lasr_encoder": "models.lasr.checkpoint",
    "llama": "models.llama.checkpoint",
    "parakeet_ctc": "models.parakeet.checkpoint",
    "parakeet_encoder": "models.parakeet.checkpoint",
    "vit": "models.vit.checkpoint",
    "wav2vec2-conformer": "models.wav2vec2_conformer.checkpoint",
}

_MODULES = {
    "BertConfig": "bert.config",
    "BertModel": "bert.modules",
    "BertOutput": "bert.modules",
    "BloomConfig": "bloom.config",
    "BloomModel": "bloom.modules",
    "CausalOutput": "layers",
    "ChatTemplate": "chat",
    "CheckpointError": "errors",
    "CheckpointWarning": "errors",
    "ConfigError": "errors",
    "ConformerConfig": "conformer.config",
    "ConformerEncoder": "conformer.modules",
    "ConformerOutput": "conformer.modules",
    "ConversionReport": "conversion",
    "GPT2Config": "gpt2.config",
    "GPT2Model": "gpt2.modules",
    "InputError": "errors",
    "KeyMismatchError": "errors",
    "Kernels": "kernels",
    "LasrConfig": "lasr.config",
    "LasrModel": "lasr.modules",
    "LlamaConfig": "llama.config",
    "LlamaModel": "llama.modules",
    "NumericError": "errors",
    "ParakeetConfig": "parakeet.config",
    "ParakeetModel": "parakeet.modules",
    "SentenceSettings": "sentence_settings",
    "ViTConfig": "vit.config",
    "ViTModel": "vit.modules",
    "ViTOutput": "vit.modules",
    "Wav2Vec2ConformerConfig": "wav2vec2_conformer.config",
    "Wav2Vec2ConformerModel": "wav2vec2_conformer.modules",
    "convert": "conversion",
    "load": "checkpoint",
    "load_chat_template": "chat",
    "load_labels": "companions",
    "load_parameters": "checkpoint",
    "load_preprocessor": "companions",
    "load_sentence_settings": "sentence_settings",
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
    "ChatTemplate",
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
    "SentenceSettings",
    "ViTConfig",
    "ViTModel",
    "ViTOutput",
    "Wav2Vec2ConformerConfig",
    "Wav2Vec2ConformerModel",
    "convert",
    "load",
    "load_chat_template",
    "load_labels",
    "load_parameters",
    "load_preprocessor",
    "load_sentence_settings",
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
