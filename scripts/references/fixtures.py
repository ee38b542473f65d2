"""What `make_reference.py` writes, and how: needs torch and transformers."""

import copy
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file

from .audio import FAMILIES as AUDIO
from .families import FAMILIES as TEXT_AND_IMAGES
from .families import Family, llama_config

IS_5 = transformers.__version__.startswith("5.")
if IS_5:
    from .families_v5 import FAMILIES, lasr_mels
else:
    FAMILIES = TEXT_AND_IMAGES | AUDIO

SEED = 20
SENTENCES = (
    "A warm loaf of bread is cooling on the kitchen table.",
    "Fresh bread stands on the table in the kitchen.",
    "The telescope photographed a spiral galaxy.",
    "Astronomers took a picture of a distant galaxy.",
    "Rain.",
    "How many stops are there between the harbour and the main station?",
    "The committee postponed its vote, since three of its nine members had fallen ill.",
    "Sorting a list of n numbers by comparisons takes on the order of n log n steps at best.",
)


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Replaces every parameter and statistic by random values that no fault can hide behind."""
    norms = {n for n, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, _, leaf = name.rpartition(".")
        # The frequencies of rotary positions are no weights; they follow from the configuration.
        if not tensor.is_floating_point() or leaf == "inv_freq":
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if leaf == "running_var":
            value = 0.5 + torch.rand(tensor.shape, generator=generator)
        elif leaf == "running_mean":
            value = 0.3 * noise
        elif owner in norms and leaf == "weight":
            value = 1 + 0.2 * noise
        else:
            value = (0.25 if tensor.ndim > 1 else 0.2) * noise
        tensor.data.copy_(value)


def make_fixture(family: Family, folder: Path, random_everywhere: bool) -> list[str]:
    """Writes one folder with weights and reference; returns what changed."""
    torch.manual_seed(SEED)
    model = family.model(family.config()).eval()
    if random_everywhere:
        randomise(model, torch.Generator().manual_seed(SEED))
    inputs = family.inputs(np.random.default_rng(SEED))
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        np.savez(Path(temporary, "reference.npz"), **run(family, model, inputs))
        return [
            change
            for name in ("config.json", "model.safetensors", "reference.npz")
            for change in replace(Path(temporary, name), folder / name)
        ]


def run(family: Family, model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a reference file: inputs, outputs of an f64 run, provenance."""
    tensors = {name: as_tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        exact = copy.deepcopy(model).double() if family.double else model
        values = family.values(exact, tensors)
    outputs = {f"outputs.{n}": v.numpy().astype(np.float32) for n, v in values.items()}
    return {f"inputs.{n}": v for n, v in inputs.items()} | outputs | {"meta": provenance()}


def as_tensor(value: np.ndarray) -> torch.Tensor:
    """Returns an input as the f64 run takes it."""
    tensor = torch.from_numpy(value)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def make_names(family: Family, folder: Path) -> list[str]:
    """Writes the tensor names and shapes that each class saves, and a sharded folder's index."""
    names = {}
    with tempfile.TemporaryDirectory() as temporary:
        for kind in (family.model, *family.task_classes):
            folder = Path(temporary, kind.__name__)
            kind(family.config()).save_pretrained(folder)
            tensors = load_file(folder / "model.safetensors")
            names[kind.__name__] = {key: list(tensors[key].shape) for key in sorted(tensors)}
        place = Path(temporary, "sharded")
        family.model(family.config()).save_pretrained(place, max_shard_size="30KB")
        index = json.loads((place / "model.safetensors.index.json").read_text())
        new = Path(temporary, "names.json")
        new.write_text(json.dumps({"classes": names, "index": index}, indent=1) + "\n")
        return replace(new, folder / "names.json")


def make_frequencies(file: Path) -> list[str]:
    """Writes the rotary frequencies of LLaMA 3.1, whose last bits matter at far positions."""
    config = llama_config()
    config.head_dim, config.max_position_embeddings = 128, 131072
    config.rope_scaling["original_max_position_embeddings"] = 8192
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary, "frequencies.npz")
        np.savez(new, frequencies=rotary.inv_freq.numpy(), meta=provenance())
        return replace(new, file)


def make_mels(file: Path) -> list[str]:
    """Writes audio and its spectrogram by LASR's feature extractor."""
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary, "mels.npz")
        np.savez(new, **lasr_mels(), meta=provenance())
        return replace(new, file)


def make_long_speech(folder: Path) -> list[str]:
    """Writes more frames than Parakeet has positions for, and what transformers computes."""
    model = transformers.ParakeetForCTC.from_pretrained(folder).eval().double()
    eighths = np.random.default_rng(SEED).integers(-16, 17, (1, 300, 24)).astype(np.int8)
    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        logits = model(torch.from_numpy(eighths / 8)).logits.numpy().astype(np.float32)
        new = Path(temporary, "long.npz")
        np.savez(new, eighths=eighths, logits=logits, meta=provenance())
        return replace(new, folder / "long.npz")


def make_sentences(source: Path, file: Path) -> list[str]:
    """Writes the embeddings of a few sentences by the real all-MiniLM-L6-v2."""
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(SENTENCES))
    ids = np.array([e.ids for e in encodings], np.int32)
    mask = np.array([e.attention_mask for e in encodings], np.int32)
    model = transformers.AutoModel.from_pretrained(source, attn_implementation="eager")
    with torch.no_grad():
        weights = torch.from_numpy(mask).double()
        output = model.eval().double()(torch.from_numpy(ids).long(), weights.long())
        total = (output.last_hidden_state * weights[..., None]).sum(1)
        embeddings = torch.nn.functional.normalize(total, dim=1).numpy().astype(np.float32)
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary, "sentences.npz")
        np.savez(
            new,
            sentences=np.array(SENTENCES),
            input_ids=ids,
            attention_mask=mask,
            embeddings=embeddings,
            meta=provenance(),
        )
        return replace(new, file)


def provenance() -> str:
    """Returns the versions and the command as JSON."""
    return json.dumps(
        {
            "origin": f"transformers {transformers.__version__}",
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "numpy": np.__version__,
            "command": "python scripts/make_reference.py tests/data --minilm FOLDER",
        }
    )


def replace(new: Path, old: Path) -> list[str]:
    """Puts a new file in the place of an old one; returns the names of what changed in it."""
    if old.exists() and old.read_bytes() == new.read_bytes():
        return []
    changes = (
        [f"{old}: {name}" for name in differing(new, old)] if old.exists() else [f"{old}: new"]
    )
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_bytes(new.read_bytes())
    return changes


def differing(new: Path, old: Path) -> list[str]:
    """Returns the names of the tensors that differ between two files, or a word for other files."""
    if new.suffix == ".json":
        return ["text"]
    load = load_file if new.suffix == ".safetensors" else np.load
    one, other = dict(load(new)), dict(load(old))
    shared = set(one) & set(other)
    return sorted((set(one) ^ set(other)) | {n for n in shared if not same(one[n], other[n])})


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def write(target: Path, families: list[str], minilm: Path | None) -> None:
    """Makes fixtures and prints what changed.

    Args:
      target: Their folder.
      families: Names in FAMILIES; all if there are none.
      minilm: Folder of the real all-MiniLM-L6-v2; None = leave it out.
    """
    torch.set_num_threads(1)
    changes = []
    for name in families or sorted(FAMILIES):
        family = FAMILIES[name]
        changes += make_fixture(family, target / name, random_everywhere=True)
        if family.variant:
            continue
        if family.default_scale:
            changes += make_fixture(family, target / f"{name}_default", random_everywhere=False)
        changes += make_names(family, target / name)
        if name == "llama":
            changes += make_frequencies(target / name / "frequencies.npz")
    if IS_5:
        changes += make_mels(target / "lasr" / "mels.npz")
        changes += make_long_speech(target / "parakeet")
    if minilm:
        changes += make_sentences(minilm, target / "minilm" / "sentences.npz")
    print("\n".join(changes) or "nothing changed")
    print(json.dumps({"changed": len(changes)} | json.loads(provenance())), file=sys.stderr)
