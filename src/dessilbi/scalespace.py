"""What DessiLBI and DessiAdamW share: the groups of the parameters, the dual variable V, and reading Γ from it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from dessilbi import iteration, sharding
from dessilbi.coupling import joint_norms, partitions
from dessilbi.groups import Elements, Number, Partition, description, entry, partition
from dessilbi.kernels import Bucket, Kernel


class InverseScaleSpace(Optimizer):
    """What DessiLBI and DessiAdamW share: the groups, the dual variable V, and reading Γ from it."""

    _rules: ClassVar[dict[str, tuple[Callable[[float], bool], str]]] = {
        "lr": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
        "kappa": (lambda x: 0 < x < math.inf, "a finite number > 0"),
        "nu": (lambda x: x > 0, "a number > 0 (inf switches the coupling off)"),
        "lam": (lambda x: x >= 0, "a number ≥ 0"),
        "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
        "beta_min": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    }

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        defaults = {**defaults, "group": "auto", "size_normalised": False}
        self._check_options(defaults)
        self._cache: dict[Any, Any] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache = {}

    # -- what the user passes ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group: `params` and, beside the options of the constructor, `group` and `size_normalised`.

        `group` is one kind or partition for all parameters, or a list of one for each.
        """
        if isinstance(param_group, dict):
            given = param_group.get("params")
            param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given or ())}
            if isinstance(param_group.get("group"), list):
                param_group["group"] = tuple(param_group["group"])
            self._check_options({**self.defaults, **param_group})
            self._check_params(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        lr = group["lr"]
        device = lr.device if isinstance(lr, Tensor) else torch.device("cpu")
        group.setdefault("time", torch.zeros((), dtype=torch.float64, device=device))

    def _check_options(self, options: dict[str, Any]) -> None:
        for name, (valid, need) in self._rules.items():
            value = options[name]
            # Tensors live on a device; looking at their value would wait for it.
            if isinstance(value, Tensor):
                if value.ndim > (name == "lam") or name not in ("lr", "lam"):
                    raise ValueError(f"{name} must be {need}, got a tensor of shape {tuple(value.shape)}")
            elif not isinstance(value, (int, float, Real)) or isinstance(value, bool):
                raise TypeError(f"{name} must be {need}, got {value!r} ({type(value).__name__})")
            elif not valid(float(value)):
                raise ValueError(f"{name} must be {need}, got {value!r}")
        if options["fused"] and options["foreach"]:
            raise ValueError("fused=True and foreach=True exclude each other: choose one, or leave both None")

    def _check_params(self, param_group: dict[str, Any]) -> None:
        known = {id(p) for g in self.param_groups for p in g["params"]}
        group, shapes = param_group.get("group", "auto"), []
        for position, given in enumerate(param_group["params"]):
            name, p = given if isinstance(given, tuple) else (f"params[{position}]", given)
            if not isinstance(p, Tensor):
                continue
            if id(p) in known:
                raise ValueError(
                    f"params: {name} of shape {tuple(p.shape)} appears twice, in one group or in two; give it once"
                )
            known.add(id(p))
            if not p.is_floating_point():
                raise ValueError(f"params: {name} is {p.dtype}; only real floating-point parameters can be optimized")
            shapes.append(p.shape)
            if isinstance(group, tuple):
                continue
            try:
                partition(group, p.shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if len(shapes) == len(param_group["params"]):
            partitions(group, shapes)
        lam = param_group.get("lam", self.defaults["lam"])
        if isinstance(lam, Tensor) and lam.ndim == 1 and len(lam) != len(param_group["params"]):
            raise ValueError(
                f"lam has {len(lam)} entries for {len(param_group['params'])} parameters: give one each, or one"
            )

    # -- one step ------------------------------------------------------------------------------------------------

    def _kernel(self, bucket: Bucket) -> Kernel:
        raise RuntimeError("subclasses choose the kernel")

    def _begin(self, p: Tensor, state: dict[str, Any], options: dict[str, Any]) -> bool:
        """Give a parameter the base optimizer's state if it has none yet; True if it was given now."""
        raise RuntimeError("subclasses say what they keep")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. `closure`, if given, re-evaluates the model and returns the loss, which is passed on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.defaults["error_if_nonfinite"]:
            self._check_gradients()
        for group in self.param_groups:
            for bucket in self._buckets(group):
                if bucket.kernel is None:
                    bucket.kernel = self._kernel(bucket)
                bucket.kernel(bucket)
                bucket.grads = []  # a bucket outlives the step; the gradients must not
            group["time"].add_(group["lr"])
        return loss

    def _buckets(self, group: dict[str, Any]) -> Sequence[Bucket]:
        """The group's parameters that have a gradient, sorted into lists that take the same step.

        What sorting them found is kept for the next step, for as long as nothing it depends on has changed.
        """
        grads = [p.grad for p in group["params"]]
        if {g.layout for g in grads if g is not None} - {torch.strided}:
            i, layout = next((i, g.layout) for i, g in enumerate(grads) if g is not None and g.layout != torch.strided)
            raise ValueError(
                f"the gradient of parameter {_name(group, i)} is sparse ({layout}); "
                "make it dense, for example with Embedding(sparse=False)"
            )
        key = [
            group["nu"] == math.inf, group.get("momentum"), group["scaling"], group["group"], group["fused"],
            group["foreach"],
            *[None if g is None else p.dtype for p, g in zip(group["params"], grads, strict=True)],
        ]  # fmt: skip
        buckets: Sequence[Bucket]
        kept_key, buckets = self._cache.get(id(group), (None, ()))
        if (
            kept_key != key
            or not all(self._is_current(group, b) for b in self._with_joint(buckets))
            or torch.compiler.is_compiling()
        ):
            buckets = self._sort(group, grads)
            # Shards may move from step to step; what was found of them is not kept.
            if not any(b.first for b in buckets) and not any(map(sharding.is_sharded, group["params"])):
                self._cache[id(group)] = key, buckets
        for b in buckets:
            b.grads = [sharding.local(grads[i]) for i in b.index]
        for b in self._with_joint(buckets):
            b.factors = {}
            if b.partitions:
                b.duals = [s["dual"] for s in b.states]
                b.scales = [s["scale"] for s in b.states] if group["scaling"] else []
                b.lams = [_lam(group, i) for i in b.index]
        return buckets

    def _with_joint(self, buckets: Sequence[Bucket]) -> Iterable[Bucket]:
        """The buckets and, once each, those that hold all of their coupled tensors."""
        return (*buckets, *{id(b.joint): b.joint for b in buckets if b.joint is not None}.values())

    def _is_current(self, group: dict[str, Any], bucket: Bucket) -> bool:
        params = group["params"]
        return all(map(operator.is_, map(self.state.get, map(params.__getitem__, bucket.index)), bucket.states))

    def _sort(self, group: dict[str, Any], grads: Sequence[Tensor | None]) -> Sequence[Bucket]:
        buckets: dict[tuple[Any, ...], Bucket] = {}
        parts = partitions_of(group) if group["nu"] != math.inf else [None] * len(grads)
        # What groups span is read of all their tensors, also of those that have no gradient in this step.
        stepping = {part.coupling for part, g in zip(parts, grads, strict=True) if part is not None and g is not None}
        joint = Bucket(group, False)
        for i, (p, g, part) in enumerate(zip(group["params"], grads, parts, strict=True)):
            coupled = part is not None and part.coupling is not None and part.coupling in stepping
            if g is None and not coupled:
                continue
            state = self.state[p]
            first = g is not None and self._begin(p, state, group)
            if part is not None:
                sharding.check(_name(group, i), p, part, group["scaling"])
                if "dual" not in state:
                    state["dual"] = state_like(p)
                if group["scaling"] and not coupled and "scale" not in state:
                    state["scale"] = part.norms(part.split(p.detach().to(state_dtype(p))))
            if coupled:
                _put(joint, i, p, state, part)
            if g is not None:
                key = (p.device, p.dtype, first, part is not None, isinstance(part, Elements), coupled)
                if key not in buckets:
                    buckets[key] = Bucket(group, first, joint=joint if coupled else None, cache=self._cache)
                _put(buckets[key], i, p, state, part)
        if group["scaling"] and any("scale" not in state for state in joint.states):
            own = joint_norms(joint.partitions, (p.detach().to(state_dtype(p)) for p in joint.params))
            for state, norms in zip(joint.states, own, strict=True):
                state.setdefault("scale", norms.clone())
        return list(buckets.values())

    def _check_gradients(self) -> None:
        named = [
            (_name(g, i), p.grad) for g in self.param_groups for i, p in enumerate(g["params"]) if p.grad is not None
        ]
        if not named:
            return
        largest = torch._foreach_norm([g for _, g in named], math.inf)
        bad = ~torch.stack([x.to(largest[0].device, torch.float32) for x in largest]).isfinite()
        if bad.any():
            first = named[int(bad.nonzero()[0])][0]
            raise ValueError(
                f"the gradient of {first} is not finite (error_if_nonfinite=True): nothing was changed; "
                "lower lr, clip the gradients, or skip this batch"
            )

    # -- reading the result --------------------------------------------------------------------------------------

    def _locate(self, p: Tensor) -> tuple[dict[str, Any], int]:
        for group in self.param_groups:
            for i, q in enumerate(group["params"]):
                if q is p:
                    return group, i
        raise ValueError(f"this tensor of shape {tuple(p.shape)} is not one of the optimizer's parameters")

    def _penalised(self, p: Tensor) -> tuple[dict[str, Any], int, Partition]:
        group, i = self._locate(p)
        part = partition(entry(group["group"], i), p.shape)
        if part is None:
            raise ValueError(f"{_name(group, i)} of shape {tuple(p.shape)} is not penalised (group=None): it has no Γ")
        return group, i, part

    def _norms(self, p: Tensor) -> Tensor:
        """‖V_g‖ of a parameter's groups; of a DTensor, of those on this rank."""
        group, i, part = self._penalised(p)
        if part.coupling is None:
            return joint_norms([part], [sharding.local(self.dual(p))])[0]
        coupled = {
            place: other
            for place, other in enumerate(partitions_of(group))
            if other is not None and other.coupling is part.coupling
        }
        duals = (sharding.local(self.dual(group["params"][place])) for place in coupled)
        return dict(zip(coupled, joint_norms(list(coupled.values()), duals), strict=True))[i]

    @torch.no_grad()
    def gamma(self, p: Tensor, norms: Tensor | None = None) -> Tensor:
        """Γ of a penalised parameter, a new tensor shaped like it, read with the λ now in force.

        `norms` are its ‖V_g‖ (see `coupling.joint_norms`), if they are at hand.
        """
        group, i, part = self._penalised(p)
        gamma = iteration.gamma(
            sharding.local(self.dual(p)),
            part,
            kappa=group["kappa"],
            lam=_lam(group, i),
            scale=self.scale(p),
            size_normalised=group["size_normalised"],
            norms=self._norms(p) if norms is None else norms,
        )
        return sharding.like(gamma, p, tuple(p.shape))

    def dual(self, p: Tensor) -> Tensor:
        """V of a penalised parameter: the optimizer's own tensor, not a copy (zeros before the first step)."""
        self._penalised(p)
        v: Tensor | None = self.state.get(p, {}).get("dual")
        return state_like(p) if v is None else v

    def scale(self, p: Tensor) -> Tensor | None:
        """ε of a penalised parameter under magnitude scaling, as its partition's `norms` shapes it; else None."""
        group, _, _ = self._penalised(p)
        return self.state.get(p, {}).get("scale") if group["scaling"] else None

    @torch.no_grad()
    def support(self, p: Tensor, norms: Tensor | None = None) -> Tensor:
        """Where Γ is not zero: bool, one entry a group; elementwise, shaped like `p`, for `group="weight"`.

        Of a DTensor it is a DTensor; `.full_tensor()`, called on all ranks, gathers it. `norms` as in `gamma`.
        """
        group, i, part = self._penalised(p)
        v = sharding.local(self.dual(p))
        support = iteration.support(
            v,
            part,
            lam=_lam(group, i),
            scale=self.scale(p),
            size_normalised=group["size_normalised"],
            norms=self._norms(p) if norms is None else norms,
        )
        return sharding.like(support, p, tuple(p.shape) if part.kind == "weight" else (part.count(p.shape),))

    def threshold(self, p: Tensor) -> Number:
        """The λ in force for a penalised parameter."""
        group, i, _ = self._penalised(p)
        return _lam(group, i)

    def options(self, p: Tensor) -> dict[str, Any]:
        """The param group of a parameter."""
        return self._locate(p)[0]

    def partition(self, p: Tensor) -> Partition | None:
        """How a parameter is cut into groups; None where it is not penalised."""
        group, i = self._locate(p)
        return partition(entry(group["group"], i), p.shape)

    def penalised(self) -> list[tuple[Tensor, Partition]]:
        """The penalised parameters and their partitions, in the optimizer's order."""
        pairs = [pair for g in self.param_groups for pair in zip(g["params"], partitions_of(g), strict=True)]
        return [(p, part) for p, part in pairs if part is not None]

    @property
    def lam(self) -> Number | list[Number]:
        """λ of the penalised groups: one value if they share it, else a list. Setting it sets all of them."""
        values = [g["lam"] for g in self.param_groups if g["group"] is not None]
        one = bool(values) and all(
            v is values[0] or (not isinstance(v, Tensor) and not isinstance(values[0], Tensor) and v == values[0])
            for v in values
        )
        return values[0] if one else values

    @lam.setter
    def lam(self, value: Number) -> None:
        valid, need = self._rules["lam"]
        if not isinstance(value, Tensor) and not valid(value):
            raise ValueError(f"lam must be {need}, got {value!r}")
        for group in self.param_groups:
            if group["group"] is not None:
                _assign(group, "lam", value)

    @property
    def time(self) -> float:
        """Path time t = Σ α_i of the first penalised group (of the first group if there is none)."""
        groups = [g for g in self.param_groups if g["group"] is not None] or self.param_groups
        return float(groups[0]["time"])

    # -- saving and loading --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, of tensors and plain values only; Partition objects become their descriptions."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group["group"] = description(group["group"])
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """As in torch. State of half-precision parameters stays in float32; partitions must be the same as before."""
        own = self.param_groups
        saved_groups = state_dict["param_groups"]
        for i, (mine, saved) in enumerate(zip(own, saved_groups, strict=False)):
            if description(mine["group"]) != saved.get("group"):
                raise ValueError(
                    f"state_dict: param group {i} was saved with group={saved.get('group')!r}, "
                    f"but this optimizer has group={description(mine['group'])!r}; build it with the same groups"
                )
        super().load_state_dict(state_dict)
        for mine, saved, loaded in zip(own, saved_groups, self.param_groups, strict=True):
            loaded["group"] = mine["group"]
            for option in ("lr", "lam", "time"):
                value, loaded[option] = loaded[option], mine[option]
                _assign(loaded, option, value)
            for index, p in zip(saved["params"], loaded["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if key == "step":
                        self.state[p][key] = value.to(step_device(p, loaded), copy=True)
                    elif isinstance(value, Tensor):
                        like = state_like(p) if value.shape == p.shape else torch.empty_like(value, device=p.device)
                        self.state[p][key] = like.copy_(value)


def state_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: its own, or float32 where that is of half precision."""
    return torch.float32 if p.dtype.itemsize <= 2 else p.dtype


def state_like(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=state_dtype(p), requires_grad=False)


def step_device(p: Tensor, options: dict[str, Any]) -> torch.device:
    """Where AdamW's step count lives: torch's fused kernel reads it on the device, its foreach code on the host."""
    return torch.device("cpu") if options["foreach"] else p.device


def _assign(group: dict[str, Any], option: str, value: Number) -> None:
    """Set an option that may be a tensor others hold on to (a CUDA graph, a controller): then in place."""
    held = group[option]
    if isinstance(held, Tensor) and (not isinstance(value, Tensor) or value.ndim <= held.ndim):
        held.copy_(value) if isinstance(value, Tensor) else held.fill_(value)
    else:
        group[option] = value


def _lam(group: dict[str, Any], i: int) -> Number:
    lam: Number = group["lam"]
    return lam[i] if isinstance(lam, Tensor) and lam.ndim == 1 else lam


def _name(group: dict[str, Any], i: int) -> str:
    return str(group["param_names"][i]) if "param_names" in group else f"params[{i}]"


def partitions_of(group: dict[str, Any]) -> list[Partition | None]:
    """How the parameters of a param group are cut into groups."""
    return partitions(group["group"], [p.shape for p in group["params"]])


def _put(bucket: Bucket, i: int, p: Tensor, state: dict[str, Any], part: Partition | None) -> None:
    bucket.index.append(i)
    bucket.params.append(sharding.local(p))
    bucket.states.append({k: sharding.local(v) for k, v in state.items()} if sharding.is_sharded(p) else state)
    if part is not None:
        bucket.partitions.append(part)
