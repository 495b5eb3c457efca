"""`KeyPrototypes`: predicts from a key and a value alone how much a model will need them.

A model's keys live in the same few clouds whatever the text, so what an important pair looks like can be learnt once,
offline, and a prompt's pairs be scored while it is read: without queries, without a second pass. Offline, `fit` has
KVzip's pass (`kvzip_scores`) measure the importance of the pairs of a few texts, and four heads learn from it:
"linear", "prototypes", "mlp", and "cosine", the score of the Proactive Cache paper. `prototype_scoring` gives their
formulas, `prototype_fitting` the recipe.

Stored in half precision: 3.9 MB for all four heads of a model with 30 layers of three key-value heads of 64.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi, ModelCardData, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig

from .atomic_file import write_beside
from .model_identity import embedding_fingerprint, same_model, shape_of, shape_text
from .prototype_fitting import FitSettings, fit_prototypes
from .prototype_scoring import FORMAT, HEADS, PrototypesConfig, Scorer, States, calibrated_scorer
from .prunable_models import text_config
from .rotary import KeyRotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG_FILE, WEIGHTS_FILE = "prototypes_config.json", "prototypes.safetensors"
CARD_FILE = "README.md"  # a repository that has a card keeps it
# Tokens scored at once: bounds what scoring needs besides the states (float32 copies of a part of them) whatever the
# prompt's length, and is large enough for a GPU.
BLOCK_TOKENS, BLOCK_TOKENS_CUDA = 2048, 16384

HOW_TO_FIT = (
    "Fit prototypes for this model once, with KeyPrototypes.fit(model, tokenizer, texts).save_pretrained(folder) or "
    "`nearfar fit-prototypes --model … --texts … --out folder`, and pass prototypes=folder."
)


class KeyPrototypes:
    """Fitted scoring heads of one model.

    Args:
        config: what it is.
        tensors: its parameters, named and shaped as `config.tensor_shapes()` says.
        source: where it was loaded from, None when it was not.

    Raises:
        ValueError: a tensor is missing, has another shape, or holds NaN or infinity.
    """

    def __init__(self, config: PrototypesConfig, tensors: dict[str, torch.Tensor], source: str | None = None) -> None:
        unknown = sorted(set(config.heads) - set(HEADS))
        if unknown or not config.heads:
            raise ValueError(f"heads must be some of {', '.join(HEADS)}, got {config.heads}.")
        for name, shape in config.tensor_shapes().items():
            if name not in tensors:
                raise ValueError(f"Prototypes lack the tensor {name!r}.")
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"Prototypes' {name!r} has shape {tuple(tensors[name].shape)}, expected {shape}.")
            if not bool(torch.isfinite(tensors[name]).all()):
                raise ValueError(f"Prototypes' {name!r} holds NaN or infinity: fit them again.")
        self.config = config
        self.tensors = {name: tensors[name] for name in config.tensor_shapes()}
        self.source = source
        self._place = {layer: index for index, layer in enumerate(config.layers)}
        self._rotation: KeyRotation | None = None
        self._scorers: dict[tuple[str, int, torch.device, torch.dtype], Scorer] = {}

    def __repr__(self) -> str:
        return f"KeyPrototypes({self.config.model_name!r}, heads={self.config.heads}, {self.nbytes():,} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_scorers": {}}  # folded parameters, made again on first use

    def nbytes(self) -> int:
        """Bytes of the stored parameters."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    # -- fitting ----------------------------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        texts: Sequence[str],
        *,
        heads: Sequence[str] = ("linear", "prototypes", "mlp", "cosine"),
        contexts: int = 10,
        context_tokens: int = 1900,
        chunk_tokens: int = 2000,
        num_prototypes: int = 256,
        cosine_prototypes: int = 16,
        mlp_hidden: int = 128,
        seed: int = 0,
        model_name: str | None = None,
        progress: bool = True,
    ) -> "KeyPrototypes":
        """Learn what a model's important pairs look like. Offline, once a model.

        Costs `contexts` KVzip passes (each a few times a prefill of `context_tokens`) and some linear algebra. Memory:
        the full caches of all contexts, on the CPU.

        Args:
            model: a causal language model in evaluation mode, with a cache that `PrunedCache` supports.
            tokenizer: its tokenizer; a chat template is used if there is one.
            texts: ordinary documents; nothing needle-like is needed. Long ones are cut into contexts, in turn; short
                ones are joined.
            heads: which heads to fit, some of `HEADS`.
            contexts, context_tokens: how much to read; about 6,000 tokens in all nearly suffice.
            chunk_tokens: see `reconstruction_scores`.
            num_prototypes, cosine_prototypes, mlp_hidden: sizes of the heads.
            seed: of k-means and of the MLP.
            model_name: recorded as the model's name; by default what it was loaded by.
            progress: show a progress bar.

        Raises:
            TypeError, ValueError: texts that are no list of strings or hold too few tokens; unknown heads; a model
                whose cache cannot be pruned, whose rotary embedding cannot be undone, or whose states are not finite.
        """
        settings = FitSettings(
            heads=tuple(heads),
            contexts=contexts,
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            num_prototypes=num_prototypes,
            cosine_prototypes=cosine_prototypes,
            mlp_hidden=mlp_hidden,
            seed=seed,
        )
        return cls(*fit_prototypes(model, tokenizer, texts, settings, model_name=model_name, progress=progress))

    # -- scoring ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        head: str = "linear",
        rotation: KeyRotation | None = None,
    ) -> torch.Tensor:
        """Predicted importance of pairs, as a calibrated log score.

        Args:
            layer_idx: the layer, one of `config.layers`.
            keys: `(batch, heads, n, head dim)`, as cached: rotated at `positions`.
            values: `(batch, heads, n, value dim)`.
            positions: `(batch or 1, n)`, whole numbers; any size, also beyond those seen when fitting.
            head: one of `config.heads`.
            rotation: how the keys were rotated; by default as in the model that was fitted.

        Returns:
            `(batch, heads, n)`, float32 (float64 for float64 keys); NaN where the states are NaN.

        Raises:
            ValueError: a head or layer that was not fitted, or states of another shape.
        """
        config = self.config
        if head not in config.heads:
            raise ValueError(f"The head {head!r} was not fitted; these prototypes have {', '.join(config.heads)}.")
        if layer_idx not in self._place:
            raise ValueError(f"Layer {layer_idx} was not fitted; these prototypes score layers {config.layers}.")
        shape = (keys.shape[1], keys.shape[-1], values.shape[-1])
        if shape != (config.num_key_value_heads, config.head_dim, config.value_dim):
            raise ValueError(
                f"States have {shape[0]} heads with keys of {shape[1]} and values of {shape[2]}, these prototypes "
                f"expect {config.num_key_value_heads}, {config.head_dim} and {config.value_dim}."
            )
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        scorer = self._scorer(head, layer_idx, keys.device, dtype)
        if rotation is None and head != "cosine":
            rotation = self.rotation
        states = States(keys, values, positions, rotation, layer_idx)
        block = BLOCK_TOKENS_CUDA if keys.is_cuda else BLOCK_TOKENS
        scores = torch.empty(keys.shape[:3], dtype=dtype, device=keys.device)
        for first in range(0, keys.shape[2], block):
            tokens = slice(first, first + block)
            scores[:, :, tokens] = scorer(states.part(tokens)).transpose(1, 2)
        return scores

    @property
    def rotation(self) -> KeyRotation:
        """How the fitted model rotates its keys."""
        if self._rotation is None:
            config = PreTrainedConfig(**self.config.rotary)
            config.model_type = self.config.model_type
            self._rotation = KeyRotation(config)
        return self._rotation

    def _scorer(self, head: str, layer_idx: int, device: torch.device, dtype: torch.dtype) -> Scorer:
        """A layer's scorer with its parameters folded and on `device`; made on first use."""
        key = (head, layer_idx, device, dtype)
        if key not in self._scorers:
            layer = {name: tensor[self._place[layer_idx]] for name, tensor in self.tensors.items()}
            self._scorers[key] = calibrated_scorer(head, layer, self.config, device, dtype)
        return self._scorers[key]

    # -- which model ------------------------------------------------------------------------------------------------

    def check_compatible(
        self, model_or_config: nn.Module | PreTrainedConfig, *, allow_other_model: bool = False
    ) -> None:
        """Refuse a model that these prototypes were not fitted on.

        A model is told from others of its shape by its input embedding; of a configuration alone only the shape can
        be looked at. Casts, quantised copies and light fine-tunes of the fitted model pass.

        Args:
            allow_other_model: accept another model of the same shape.

        Raises:
            TypeError, ValueError: not a model whose cache can be pruned; another shape; another model.
        """
        mine, theirs = _shape_of_fitted(self.config), shape_of(text_config(model_or_config))
        if mine != theirs:
            raise ValueError(
                f"These prototypes were fitted on {self.config.model_name!r} with {mine}; this model has {theirs}. "
                f"{HOW_TO_FIT}"
            )
        if allow_other_model:
            return
        if same_model(self.config.fingerprint, embedding_fingerprint(model_or_config)) is False:
            raise ValueError(
                f"These prototypes were fitted on {self.config.model_name!r}; this model has the same shape but other "
                f"weights, so its keys mean something else. {HOW_TO_FIT} To use them all the same, pass "
                "allow_other_model=True."
            )

    # -- files ------------------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `prototypes.safetensors` and `prototypes_config.json`; each is written beside and renamed.

        Raises:
            ValueError: the path is a file.
        """
        directory = Path(directory)
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file; give a folder to save prototypes in.")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        text = json.dumps(asdict(self.config), indent=2, ensure_ascii=False) + "\n"
        # The configuration comes last: a folder that has one is complete.
        write_beside(directory / WEIGHTS_FILE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        write_beside(directory / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def from_pretrained(
        cls, directory_or_id: str | Path, *, revision: str | None = None, token: str | bool | None = None
    ) -> "KeyPrototypes":
        """Load prototypes from a folder, from those that come with the package (by name), or from the Hub.

        Args:
            directory_or_id: a folder written by `save_pretrained`, a packaged name (`packaged_prototypes()`), or a
                repository id on the Hub.
            revision: branch, tag or commit on the Hub.
            token: for private repositories, as in huggingface_hub.

        Raises:
            FileNotFoundError: neither a folder nor a repository id; a folder without prototypes.
            ValueError: damaged or foreign files.
            OSError: the Hub cannot be reached or has no such repository (huggingface_hub's own errors).
        """
        name = str(directory_or_id)
        if Path(directory_or_id).is_dir():
            return cls._load(Path(directory_or_id), name)
        if name in packaged_prototypes():
            return _load_packaged(name)
        if isinstance(directory_or_id, Path) or name.startswith((".", "~", os.sep)) or name.count("/") != 1:
            raise FileNotFoundError(
                f"{name!r} is neither a folder, nor a Hub id (owner/name), nor one of the packaged prototypes: "
                f"{', '.join(packaged_prototypes()) or 'there are none'}."
            )
        folder = snapshot_download(name, revision=revision, token=token, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE])
        return cls._load(Path(folder), name)

    @classmethod
    def _load(cls, directory: Path, source: str) -> "KeyPrototypes":
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{directory} holds no prototypes: {name} is missing.")
        try:
            content = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{directory / CONFIG_FILE} is not valid JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{directory / CONFIG_FILE} is not of format {FORMAT!r} but {found!r}.")
        known = {f.name for f in fields(PrototypesConfig)}
        try:
            config = PrototypesConfig(**{name: value for name, value in content.items() if name in known})
            return cls(config, load_file(directory / WEIGHTS_FILE), source)
        except (TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"The prototypes in {directory} are damaged: {error}") from error

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload key prototypes",
        token: str | bool | None = None,
    ) -> str:
        """Upload to a model repository on the Hub, which is made if it is not there; returns the commit's URL."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            if not api.file_exists(repo_id, CARD_FILE, revision=revision):
                Path(folder, CARD_FILE).write_text(self._card(repo_id), encoding="utf-8")
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
            )
        return str(commit.commit_url)

    def _card(self, repo_id: str) -> str:
        """README.md of a repository."""
        config = self.config
        on_hub = config.model_name.count("/") == 1 and not config.model_name.startswith((".", "~", os.sep))
        data = ModelCardData(
            library_name="nearfar",
            tags=["nearfar", "kv-cache", "key-prototypes"],
            base_model=config.model_name if on_hub else None,
            base_model_relation="adapter" if on_hub else None,
        )
        name = config.model_name if on_hub else Path(config.model_name).name
        return f"""---
{data.to_yaml()}
---

# Key prototypes of {name}

They predict which key-value pairs of this model ({config.model_type}, {len(config.layers)} layers scored) a prompt
will need, so that a cache can be pruned while the prompt is read. Heads: {", ".join(config.heads)}.

```python
from nearfar import ProactiveCache

cache = ProactiveCache(model, retention_ratio=0.3, prototypes="{repo_id}")
```
"""


def _shape_of_fitted(config: PrototypesConfig) -> str:
    return shape_text(config.model_type, config.layers, config.num_key_value_heads, config.head_dim)


# --- prototypes that come with the package ---------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _packaged() -> dict[str, Path]:
    here = Path(__file__).resolve().parent.parent
    # Installed, this file lies in nearfar/modeling; in a checkout, in modeling beside nearfar.
    for folder in (here / "prototypes", here / "nearfar" / "prototypes"):
        found = {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{CONFIG_FILE}"))}
        if found:
            return found
    return {}


def packaged_prototypes() -> list[str]:
    """Names of the prototypes that come with the package."""
    return list(_packaged())


@lru_cache(maxsize=4)
def _load_packaged(name: str) -> KeyPrototypes:
    return KeyPrototypes._load(_packaged()[name], name)


def find_prototypes(model_or_config: nn.Module | PreTrainedConfig) -> KeyPrototypes:
    """The packaged prototypes of a model.

    Raises:
        ValueError: there are none for it, or a configuration was given, which does not tell a model from others of its
            shape.
    """
    shape = shape_of(text_config(model_or_config))
    fingerprint = embedding_fingerprint(model_or_config)
    for name in packaged_prototypes():
        prototypes = _load_packaged(name)
        if _shape_of_fitted(prototypes.config) != shape:
            continue
        if not fingerprint:
            raise ValueError(
                f"The packaged prototypes {name!r} fit this configuration's shape, but a configuration does not tell "
                f"whether they belong to the model: pass the model itself, or prototypes={name!r}."
            )
        if same_model(prototypes.config.fingerprint, fingerprint):
            return prototypes
    raise ValueError(
        f"No prototypes come with the package for this model ({shape}); there are some for: "
        f"{', '.join(packaged_prototypes()) or 'none'}. {HOW_TO_FIT}"
    )
