"""One optimiser for a language model: matrices to Muon, Mano or AdamW, and all else to AdamW, with its own rates.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest matrix with orthonormal rows or columns,
which Newton–Schulz steps approach by products alone. Scaled by 0.2 √max(rows, columns) (Liu et al., arXiv 2502.16982)
its entries have AdamW's root mean square, so that one learning rate does for both.

    optimizer = make_optimizer(model, "muon", lr=3e-3)
    scheduler = warmup_constant_linear(optimizer, warmup_steps=100, total_steps=3000)
    Trainer(model, arguments, optimizers=(optimizer, scheduler), ...)

`torch.optim.Muon` takes the matrices one by one, 23 operations each: 3,450 kernel launches a step for 150 matrices.
`BatchedMuon` takes all matrices of one shape at once, 27 operations a shape: some 200 for eight shapes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from nearfar.training.mano import Mano, StackedMatrixOptimizer, keep_momentum_precision

__all__ = [
    "BatchedMuon",
    "MatrixOptimizer",
    "make_optimizer",
    "optimizer_groups",
    "warmup_constant_linear",
    "warmup_cosine",
]

OPTIMIZERS = ("muon", "mano", "adamw")
KINDS = ("matrices", "embeddings", "gates", "vectors")
# Modules that hold the gates between near and far, or proxies and raw tokens. SwiGLU's `gate_proj` is a matrix.
GATE_MODULES = ("proxy_gate",)
# Output layers by name, where a model has no get_output_embeddings or more heads than that one.
HEAD_MODULES = ("embed_out", "classifier", "score")

# Quintic Newton–Schulz coefficients by Jordan, as in torch.optim.Muon: steep at zero, not exact at one.
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class BatchedMuon(StackedMatrixOptimizer):
    """Muon over stacks of equally shaped matrices; the steps and the state of `torch.optim.Muon`.

    Args:
        params: matrices with both sides above 1, or groups of them. Not embeddings or heads. Separate q, k and v do
            better than one fused projection, which is orthogonalised as a whole.
        lr: learning rate; one step moves the entries by about 0.2 · `lr` in root mean square.
        weight_decay: decoupled: weights shrink by `lr · weight_decay` a step.
        momentum: of the gradients' running mean.
        nesterov: look one step ahead.
        ns_coefficients: (a, b, c) of x ← a x + (b x xᵀ + c (x xᵀ)²) x.
        eps: smallest Frobenius norm that a matrix is divided by.
        ns_steps: Newton–Schulz steps.
        adjust_lr_fn: "match_rms_adamw", 0.2 √max(rows, columns), or "original", √max(1, rows / columns).
        ns_dtype: of the Newton–Schulz products. None is bfloat16 on CUDA and float32 elsewhere; float64 weights
            always stay in float64.

    Raises:
        ValueError: a parameter that is not such a matrix, or a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        *,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if not 1 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps must be 1 to 99, got {group['ns_steps']}")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {group['ns_coefficients']}")
        if group["adjust_lr_fn"] not in ("match_rms_adamw", "original"):
            raise ValueError(f'adjust_lr_fn must be "match_rms_adamw" or "original", got {group["adjust_lr_fn"]!r}')
        if group["ns_dtype"] is not None and not group["ns_dtype"].is_floating_point:
            raise ValueError(f"ns_dtype must be a floating-point dtype or None, got {group['ns_dtype']}")

    def _directions(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, float]:
        momentum = group["momentum"]
        buffers = self._momenta(params)
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        moves = torch.stack(buffers)
        if group["nesterov"]:
            moves = torch.stack(grads).lerp_(moves, momentum)
        dtype = group["ns_dtype"]
        if dtype is None or moves.dtype == torch.float64:
            dtype = torch.bfloat16 if moves.is_cuda and moves.dtype == torch.float32 else moves.dtype
        directions = newton_schulz(moves.to(dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = moves.shape[1:]
        if group["adjust_lr_fn"] == "original":
            factor = math.sqrt(max(1, rows / columns))
        else:
            factor = 0.2 * math.sqrt(max(rows, columns))
        return directions.to(moves.dtype), factor


def newton_schulz(
    matrices: Tensor, coefficients: Sequence[float] = MUON_COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Approach U Vᵀ of each matrix U S Vᵀ; its singular values end up near 1, between 0.7 and 1.2.

    Args:
        matrices: `(matrices, rows, columns)`, computed in its dtype.
        coefficients: (a, b, c) of x ← a x + (b x xᵀ + c (x xᵀ)²) x.
        steps: of the iteration.
        eps: smallest Frobenius norm that a matrix is divided by.

    Returns:
        Same shape and dtype; matrices of zeros stay so.
    """
    a, b, c = coefficients
    x = matrices / torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=eps)
    # x xᵀ is square in the shorter side.
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MatrixOptimizer(Optimizer):
    """Several optimisers as one: one list of groups, one state, one step.

    Learning-rate schedules, `state_dict`, gradient scalers, Accelerate and transformers' Trainer see a single
    optimiser; each part sees its own groups, which are the same dictionaries.

    Args:
        parts: optimisers over different parameters.

    Raises:
        ValueError: no parts, or a parameter in two of them.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts: list[tuple[Optimizer, int]] = []  # with the number of groups
        groups = [group for part in parts for group in part.param_groups]
        # Some schedules of transformers read the default rate; every group has its own.
        super().__init__(groups, {"lr": groups[0]["lr"]} if groups else {})
        self._parts = [(part, len(part.param_groups)) for part in parts]

    def _share(self) -> None:
        """Give the parts this optimiser's groups and state; both are replaced by loading, and by Accelerate."""
        first = 0
        for part, count in self._parts:
            part.param_groups = self.param_groups[first : first + count]
            part.state = self.state
            first += count

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once made, with a `ValueError`: which part should take the group?"""
        if self._parts:
            raise ValueError("a MatrixOptimizer takes no further groups: unfreeze, then call make_optimizer again")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with every part.

        Args:
            closure: computes the loss anew, with its gradients; called once.

        Returns:
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for part, _ in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for the same parameters in the same order and the same kind of optimiser."""
        saved = [(group.get("kind"), group.get("optimizer")) for group in state_dict["param_groups"]]
        own = [(group.get("kind"), group.get("optimizer")) for group in self.param_groups]
        if saved != own:
            raise ValueError(f"the saved state is of groups {saved}, this optimizer's are {own}: make it the same way")
        super().load_state_dict(state_dict)
        keep_momentum_precision(self, state_dict)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        # torch's keeps these three only. The parts' own copies are the same objects, and stay so.
        self._share()
        return {**super().__getstate__(), "_parts": self._parts}


def make_optimizer(
    model: nn.Module,
    kind: str = "muon",
    lr: float = 3e-3,
    *,
    embedding_lr: float | None = None,
    gate_lr: float | None = None,
    vector_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    nesterov: bool | None = None,
    ns_steps: int = 5,
    normalize_weights: bool = True,
    capturable: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> MatrixOptimizer:
    """Make the optimiser of a model: one object, with a group for each kind of parameter that the model has.

    `optimizer_groups` says which parameter is of which kind. Frozen parameters are left out, tied ones come once. Each
    group holds its kind in `kind` and its optimiser's name in `optimizer`, beside `lr` and the rest.

    Weights should be float32, with autocast for speed: steps that are small beside a bfloat16 weight are lost. There
    is a warning where they are not.

    Args:
        model: where it is; move it to the GPU first if `capturable`.
        kind: of the matrices' optimiser: "muon", "mano" or "adamw". The rest goes to AdamW.
        lr: of the matrices. With `momentum`, 3e-3 is for Muon; Mano's paper uses 3e-4 to 6e-4.
        embedding_lr: of embeddings and heads; None is `lr`.
        gate_lr: of gates; None is `lr`.
        vector_lr: of norms, biases and all that is left; None is `lr`.
        betas, eps: of AdamW.
        weight_decay: of matrices, embeddings and heads, decoupled. Gates and vectors do not decay.
        momentum: of Muon and Mano.
        nesterov: of Muon and Mano; None is each paper's own: Muon with, Mano without.
        ns_steps: Newton–Schulz steps of Muon.
        normalize_weights: of Mano; see there.
        capturable: lets a CUDA graph hold AdamW's and Muon's step; set groups' `lr` to GPU tensors then. Mano turns
            between rows and columns on the host, so it wants two graphs, one for each.
        kinds: `fnmatch` patterns of parameter names to one of "matrices", "embeddings", "gates", "vectors", to
            overrule the choice, the first that matches: `{"*.router.weight": "vectors"}`.

    Returns:
        The optimiser.

    Raises:
        ValueError: a value out of range, nothing to train, or a pattern that matches nothing.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"kind must be one of {', '.join(OPTIMIZERS)}, got {kind!r}")
    rates = {
        "matrices": lr,
        "embeddings": lr if embedding_lr is None else embedding_lr,
        "gates": lr if gate_lr is None else gate_lr,
        "vectors": lr if vector_lr is None else vector_lr,
    }
    names = ("lr", "embedding_lr", "gate_lr", "vector_lr")
    for name, value in (*zip(names, rates.values(), strict=True), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and 0 or more, got {value}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers of at least 0 and less than 1, got {betas}")

    named = dict(model.named_parameters())
    groups: dict[str, dict[str, Any]] = {
        name: {
            "params": [named[parameter] for parameter in parameters],
            "kind": name,
            "optimizer": kind if name == "matrices" else "adamw",
            "lr": rates[name],
            "weight_decay": weight_decay if name in ("matrices", "embeddings") else 0.0,
        }
        for name, parameters in optimizer_groups(model, kinds).items()
        if parameters
    }
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad: there is nothing to train")
    low = sorted({str(p.dtype) for g in groups.values() for p in g["params"] if p.dtype.itemsize < 4})
    if low:
        warnings.warn(
            f"weights are {', '.join(low)}: small steps will be lost in rounding. Train float32 weights under "
            "autocast (bf16=True in TrainingArguments)",
            stacklevel=2,
        )

    parts: list[Optimizer] = []
    if kind != "adamw" and "matrices" in groups:
        matrices = [groups.pop("matrices")]
        if kind == "muon":
            look_ahead = True if nesterov is None else nesterov
            parts.append(BatchedMuon(matrices, momentum=momentum, nesterov=look_ahead, ns_steps=ns_steps))
        else:
            parts.append(
                Mano(matrices, momentum=momentum, nesterov=bool(nesterov), normalize_weights=normalize_weights)
            )
    if groups:
        parts.append(AdamW(list(groups.values()), betas=betas, eps=eps, capturable=capturable))
    return MatrixOptimizer(parts)


def optimizer_groups(model: nn.Module, kinds: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Sort a model's parameters by how they are optimised.

    - "embeddings": input embeddings and output heads, also where they are tied: `nn.Embedding`, what
      `get_output_embeddings` returns, and linear layers called `head`, `…_head`, `embed_out`, `classifier` or `score`.
    - "gates": everything in a module, or a parameter, called `proxy_gate`.
    - "matrices": the weights of other linear layers with both sides above 1.
    - "vectors": norms, biases and all that is left.

    Args:
        model: any model.
        kinds: patterns of names that overrule this; see `make_optimizer`.

    Returns:
        Names as in `model.named_parameters()`, under each of the four kinds, in the model's order. Frozen parameters
        are in none.

    Raises:
        ValueError: a pattern that matches no parameter, an unknown kind, or a parameter under "matrices" that is not a
            matrix with both sides above 1.
    """
    kinds = dict(kinds or {})
    for given, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"kinds[{given!r}] must be one of {', '.join(KINDS)}, got {kind!r}")
    # Tied parameters count as embeddings if any of the modules that share them is one.
    embeddings, linear = set(), set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) or (
            isinstance(module, nn.Linear) and (own in HEAD_MODULES or own == "head" or own.endswith("_head"))
        ):
            embeddings.add(id(weight))
        elif isinstance(module, nn.Linear):
            linear.add(id(weight))
    get_output = getattr(model, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else None
    if isinstance(output, nn.Module):
        embeddings.add(id(getattr(output, "weight", None)))

    groups: dict[str, list[str]] = {kind: [] for kind in KINDS}
    matched = set()
    for name, parameter in model.named_parameters():
        pattern = next((pattern for pattern in kinds if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            matched.add(pattern)
        if not parameter.requires_grad:
            continue
        matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        if pattern is not None:
            kind = kinds[pattern]
            if kind == "matrices" and not matrix:
                raise ValueError(
                    f"kinds[{pattern!r}] puts {name} under matrices, and its shape is {tuple(parameter.shape)}"
                )
        elif any(part in GATE_MODULES for part in name.split(".")):
            kind = "gates"
        elif id(parameter) in embeddings:
            kind = "embeddings"
        elif id(parameter) in linear and matrix:
            kind = "matrices"
        else:
            kind = "vectors"
        groups[kind].append(name)
    for pattern in kinds:
        if pattern not in matched:
            raise ValueError(f"kinds[{pattern!r}] is the first to match no parameter of {type(model).__name__}")
    return groups


def warmup_constant_linear(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, decay_fraction: float = 0.4, final: float = 0.05
) -> LambdaLR:
    """Schedule that warms up, stays, and falls linearly at the end.

    Step i, from 0, runs at (i + 1) / `warmup_steps` of each group's learning rate, later ones at all of it. Over the
    last `decay_fraction` of the steps it falls to `final` of it, which the last step runs at.

    Args:
        optimizer: whose groups are all scaled.
        warmup_steps: 0 for none.
        total_steps: steps of the run.
        decay_fraction: of `total_steps`; 0 for none.
        final: of the learning rate.

    Returns:
        The schedule, to be stepped after each optimiser step.

    Raises:
        ValueError: a value out of range, or a warm-up that reaches into the decay.
    """
    _check_steps(warmup_steps, total_steps)
    for name, value in (("decay_fraction", decay_fraction), ("final", final)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
    decay_steps = round(total_steps * decay_fraction)
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"{warmup_steps} warm-up steps and {decay_steps} of decay are more than total_steps, {total_steps}: take "
            "fewer of either"
        )
    return LambdaLR(
        optimizer,
        partial(
            _constant_linear_factor, warmup_steps=warmup_steps, total_steps=total_steps, decay_steps=decay_steps,
            final=final,
        ),
    )  # fmt: skip


def warmup_cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int, final: float = 0.0) -> LRScheduler:
    """Schedule that warms up from 0 and falls along half a cosine: transformers' `cosine_with_min_lr`.

    Args:
        optimizer: whose groups are all scaled.
        warmup_steps: 0 for none.
        total_steps: steps of the run.
        final: of each group's learning rate, at the end.

    Returns:
        The schedule, to be stepped after each optimiser step.

    Raises:
        ValueError: a value out of range.
    """
    _check_steps(warmup_steps, total_steps)
    if not 0 <= final <= 1:
        raise ValueError(f"final must be between 0 and 1, got {final}")
    return get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps,
        scheduler_specific_kwargs={"min_lr_rate": final},
    )  # fmt: skip


def _constant_linear_factor(
    step: int, *, warmup_steps: int, total_steps: int, decay_steps: int, final: float
) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decayed = min(step + 1 - (total_steps - decay_steps), decay_steps)
    if decayed <= 0:
        return 1.0
    return 1 - (1 - final) * decayed / decay_steps


def _check_steps(warmup_steps: int, total_steps: int) -> None:
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps must be between 0 and total_steps, {total_steps}, got {warmup_steps}")
