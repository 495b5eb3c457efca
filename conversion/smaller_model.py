"""A smaller model out of a target's weights: fewer layers, or a narrower residual stream, or both.

Fewer layers: those chosen are copied as they are. A sibling at the target's width thus starts with the target's own
heads, which is what a proxy is read for.

Narrower: the residual stream is projected onto the principal components of what the layers read, the states after
RMSNorm's division (so that a few tokens of huge norm do not decide). Heads, their size and the MLPs' inner width stay;
every matrix that reads the stream is multiplied by the projection, every one that writes to it by its transpose:

    W_read' = W_read · diag(g) · P        W_write' = Pᵀ · W_write        E' = E · P

with g the gain of the norm before it, which then becomes one number: the mean ratio of the two norms' divisors. What
is not exact: RMSNorm divides by the norm of what is left of the stream, and a tied output head cannot take in the last
norm's gain, of which the diagonal in the new basis stays. Distillation makes up for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from nearfar.training.token_blocks import TokenBlocks

__all__ = [
    "MODEL_TYPES",
    "choose_layers",
    "fewer_layers",
    "load_target",
    "narrower",
    "read_target_config",
    "residual_components",
]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
# Lists in a configuration that have an entry for each layer.
_PER_LAYER = ("layer_types", "no_rope_layers")
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_LAYER_MODULES = {
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip


# --- the target ------------------------------------------------------------------------------------------------------


def read_target_config(source: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """The target's configuration, if a sibling can be made of it.

    Raises:
        ValueError: another kind of model, or a quantised one.
        FileNotFoundError: a path that leads nowhere.
        OSError: a Hub id that cannot be reached.
    """
    from transformers import AutoConfig

    source = str(source)
    # What can only be a path is not looked for on the Hub.
    if not Path(source).expanduser().exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise FileNotFoundError(f"no such checkpoint folder: {source}")
    fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    model_type = fields.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{source} has model_type {model_type!r}: a sibling can be made of {', '.join(MODEL_TYPES)} (SmolLM and "
            "SmolLM2 are llama)"
        )
    if fields.get("quantization_config"):
        raise ValueError(f"{source} is quantised: give the checkpoint that it was made from")
    config: PreTrainedConfig = AutoConfig.from_pretrained(source, revision=revision)
    return config


def load_target(source: str | Path, *, revision: str | None = None) -> PreTrainedModel:
    """The target on the CPU, in the checkpoint's dtype and in eval mode.

    Raises:
        ValueError: tensors that are missing, of another shape, or in a damaged file.
        OSError: no weights there.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(source), revision=revision, dtype="auto", output_loading_info=True
        )
    except (SafetensorError, RuntimeError) as error:  # RuntimeError: shapes that differ
        raise ValueError(f"the weights of {source} cannot be read: {' '.join(str(error).split())}") from error
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(f"the checkpoint {source} lacks {len(missing)} tensor(s): {shown}")
    result: PreTrainedModel = model.eval()
    return result


# --- fewer layers ----------------------------------------------------------------------------------------------------


def choose_layers(total: int, wanted: int | Sequence[int] | None) -> list[int]:
    """Which layers of `total` a sibling keeps.

    Args:
        wanted: how many, evenly spaced with the first and the last among them; or their indices, ascending; or `None`
            for all.

    Raises:
        ValueError: more layers than there are, none, or indices that are not ascending and in range.
    """
    if wanted is None:
        return list(range(total))
    if isinstance(wanted, int):
        if not 1 <= wanted <= total:
            raise ValueError(f"a sibling keeps between 1 and all {total} layers of its target, got {wanted}")
        return [0] if wanted == 1 else [round(i * (total - 1) / (wanted - 1)) for i in range(wanted)]
    layers = list(wanted)
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= total:
        raise ValueError(
            f"layers must be ascending indices from 0 to {total - 1}, each of them once, got "
            f"{', '.join(map(str, layers)) or 'none'}"
        )
    return layers


def fewer_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A copy of `model` with some of its layers; in its dtype, on its device, in eval mode.

    Args:
        model: of `MODEL_TYPES`.
        layers: from `choose_layers`.
    """
    config = copy.deepcopy(model.config)
    for name in _PER_LAYER:
        entries = getattr(config, name, None)
        if entries is not None:
            setattr(config, name, [entries[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    if getattr(config, "max_window_layers", None) is not None:  # of no meaning beside layer_types
        config.max_window_layers = len(layers)
    renamed = {f"model.layers.{layer}.": f"model.layers.{place}." for place, layer in enumerate(layers)}
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.layers."):
            kept[name] = tensor
            continue
        prefix = ".".join(name.split(".")[:3]) + "."
        if prefix in renamed:
            kept[renamed[prefix] + name.removeprefix(prefix)] = tensor
    return _filled(config, kept, model)


def _filled(config: PreTrainedConfig, tensors: dict[str, torch.Tensor], like: PreTrainedModel) -> PreTrainedModel:
    """A model of `config` with copies of `tensors`."""
    with torch.device(like.device):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=like.dtype)
    made.load_state_dict(tensors)
    made.tie_weights()
    made.generation_config = copy.deepcopy(like.generation_config)
    return made.eval()


# --- narrower --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def residual_components(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    batch_size: int = 4,
    precision: AbstractContextManager[Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Principal components of what the layers read, the states after RMSNorm's division and before its gain.

    Args:
        model: of `MODEL_TYPES`, in eval mode.
        blocks: text to read.
        batch_size: blocks a forward pass.
        precision: where forward passes run, for instance autocast.

    Returns:
        Orthonormal columns, the most important first, `(hidden size, hidden size)`, and the mean square along each,
        `(hidden size,)`; float64, on the CPU.
    """
    size = model.config.hidden_size
    device = model.get_input_embeddings().weight.device
    moments = torch.zeros(size, size, dtype=torch.float64, device=device)
    count = 0

    def collect(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal count
        states = inputs[0].flatten(0, 1).float()
        states = states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        with torch.autocast(states.device.type, enabled=False):
            moments.add_((states.T @ states).double())
        count += states.shape[0]

    handles = [norm.register_forward_pre_hook(collect) for norm in _stream_norms(model)]
    try:
        with precision or nullcontext():
            for start in range(0, len(blocks), batch_size):
                rows = [blocks[i]["input_ids"] for i in range(start, min(start + batch_size, len(blocks)))]
                model.model(input_ids=torch.stack(rows).to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    values, vectors = torch.linalg.eigh((moments / count).cpu())
    return vectors.flip(1), values.flip(0).clamp(min=0)


def _stream_norms(model: Any) -> list[nn.Module]:
    found: list[nn.Module] = [model.model.norm]
    for layer in model.model.layers:
        found += [layer.input_layernorm, layer.post_attention_layernorm]
    return found


@torch.no_grad()
def narrower(
    model: PreTrainedModel, hidden_size: int, components: tuple[torch.Tensor, torch.Tensor]
) -> PreTrainedModel:
    """A copy of `model` with a residual stream of `hidden_size` numbers; in its dtype, on its device.

    Args:
        model: of `MODEL_TYPES`, with any number of layers.
        hidden_size: at most the model's.
        components: from `residual_components`.

    Raises:
        ValueError: a size out of range, or weights of a kind that is not known.
    """
    size = model.config.hidden_size
    if not 1 <= hidden_size <= size:
        raise ValueError(f"hidden_size must be between 1 and the target's {size}, got {hidden_size}")
    basis, energies = components
    projection = basis[:, :hidden_size].to(model.device, torch.float64)  # (size, hidden size)
    # What RMSNorm divides by: the root of the mean square of all numbers before, of those that are left now.
    share = float(energies[:hidden_size].sum() / energies.sum())
    gain = (share * size / hidden_size) ** 0.5
    found = {name: tensor.double() for name, tensor in model.state_dict().items()}
    result: dict[str, torch.Tensor] = {}

    def norm_of(name: str) -> torch.Tensor:
        return found[f"{name}.weight"]

    for name, tensor in found.items():
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        if parts[:2] != ["model", "layers"]:
            if module == "model.embed_tokens":
                result[name] = tensor @ projection
            elif module == "lm_head" and kind == "weight":
                tied = model.config.tie_word_embeddings
                result[name] = tensor @ projection if tied else (tensor * norm_of("model.norm")) @ projection
            elif module == "model.norm":
                gains = torch.full((hidden_size,), gain, dtype=torch.float64, device=tensor.device)
                if model.config.tie_word_embeddings:
                    gains = gains * (projection.square() * tensor[:, None]).sum(0)
                result[name] = gains
            else:
                raise ValueError(f"a narrower sibling is not known for the weight {name}")
            continue
        layer, own = ".".join(parts[:3]), ".".join(parts[3:])
        if own not in _LAYER_MODULES:
            raise ValueError(f"a narrower sibling is not known for the weight {name}")
        read = next((norm for norm, readers in _READERS.items() if own in readers), None)
        if own in _READERS:
            tensor = torch.full((hidden_size,), gain, dtype=torch.float64, device=tensor.device)
        elif read is not None and kind == "weight":
            tensor = (tensor * norm_of(f"{layer}.{read}")) @ projection
        elif own in _WRITERS:  # bias too
            tensor = projection.T @ tensor
        result[name] = tensor
    config = copy.deepcopy(model.config)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = size // config.num_attention_heads
    config.hidden_size = hidden_size
    return _filled(config, {name: tensor.to(model.dtype) for name, tensor in result.items()}, model)
