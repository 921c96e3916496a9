"""The optimizer of a run, put together from what each parameter declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kimi_jax.config import OptimConfig
from kimi_jax.model.param import Declaration
from kimi_jax.model.rules import AdamW, Muon, QKClip, Rule
from kimi_jax.optim.muon import STEP_BYTES, MuonState, block_shape, scale_by_muon
from kimi_jax.optim.qk_clip import qk_clip
from kimi_jax.optim.schedule import schedule


def rule_label(rule: Rule) -> str:
    """The group that a rule belongs to: "muon", "adamw", "adamw_no_decay" or "balanced"."""
    if isinstance(rule, Muon):
        return "muon"
    if isinstance(rule, AdamW):
        return "adamw" if rule.decay else "adamw_no_decay"
    return "balanced"


def _partition(transforms, labels: dict[str, str]) -> optax.GradientTransformationExtraArgs:
    """Each group of leaves through its own transformation, which sees a dict of these leaves alone.

    Unlike `optax.partition`, whose groups are the whole tree with placeholders, the state holds arrays under
    `{label}...{path}` and nothing else: what a checkpoint lists.
    """

    transforms = {group: optax.with_extra_args_support(transform) for group, transform in transforms.items()}

    def select(values, group):
        return {path: values[path] for path, label in labels.items() if label == group}

    def init(params):
        if params.keys() != labels.keys():
            missing, extra = sorted(labels.keys() - params.keys()), sorted(params.keys() - labels.keys())
            raise ValueError(f"parameters differ from their declarations: missing {missing}, undeclared {extra}")
        return {group: transform.init(select(params, group)) for group, transform in transforms.items()}

    def update(updates, state, params=None, **extra):
        assert params is not None
        results, states = {}, {}
        for group, transform in transforms.items():
            part, states[group] = transform.update(select(updates, group), state[group], select(params, group), **extra)
            results |= part  # type: ignore[operator]
        return results, states

    return optax.GradientTransformationExtraArgs(init, update)


def _at_least_float32(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on arrays cast to at least float32, so that its state is, whatever the parameters are."""

    def promote(values):
        return {path: v.astype(jnp.promote_types(v.dtype, jnp.float32)) for path, v in values.items()}

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("weight decay and QK-Clip need the weights: call update with params")
        return inner.update(promote(updates), state, promote(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(promote(params)), update)


def _skippable(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Lets `update` take `accept`, a boolean scalar: where false, the state stays as it was."""

    def update(updates, state, params=None, *, accept=None, **extra):
        updates, new = inner.update(updates, state, params, accept=accept, **extra)
        if accept is not None:
            new = jax.tree.map(
                lambda a, b: a if isinstance(a, MuonState) else jnp.where(accept, a, b),  # Muon has chosen, in place
                new,
                state,
                is_leaf=lambda node: isinstance(node, MuonState),
            )
        return updates, new

    return optax.GradientTransformationExtraArgs(inner.init, update)


def build(
    config: OptimConfig,
    declared: Mapping[str, Declaration],
    *,
    steps: int,
    mla_rows: dict[str, np.ndarray],
    step_bytes: int = STEP_BYTES,
) -> optax.GradientTransformationExtraArgs:
    """Per-Head Muon and AdamW with decoupled decay, the schedule, then QK-Clip.

    W <- (W - rate (direction + decay W)) gamma^exponent: `direction` is Muon's or Adam's by the parameter's rule,
    decay is `config.weight_decay` for Muon and `AdamW(decay=True)` and zero elsewhere, gamma is `qk_clip`'s.
    A `Balanced` parameter is left as it is and has no state.

    Args:
        config: rates, betas, decay and the largest logit.
        declared: every parameter, by path; `model.kimi.declared`.
        steps: steps of the run, for the schedule.
        mla_rows: path -> rows of `max_logits`, for every parameter with a clip (see `qk_clip`).
        step_bytes: of `scale_by_muon`.

    Returns:
        A transformation of flat dicts {path: array}. `update(grads, state, params, max_logits=..., accept=...)` with
        max_logits [MLA layers, h] and, if the step may be skipped, a boolean scalar: where false the state stays.
        (A choice between two states made by the caller would keep both in memory.) The updates are then the
        caller's to drop: `where(accept, params + updates, params)` is elementwise and needs no copy.
        State and updates are at least float32, and sharded as the parameters are.
    """
    labels = {path: rule_label(each.rule) for path, each in declared.items()}
    rules = {path: each.rule for path, each in declared.items() if isinstance(each.rule, Muon)}
    clips = {path: each.clip for path, each in declared.items() if each.clip is not None}
    adam = optax.scale_by_adam(config.adam_b1, config.adam_b2, eps=1e-8)
    decay = optax.add_decayed_weights(config.weight_decay)
    groups = {
        "muon": optax.chain(scale_by_muon(rules, momentum=config.momentum, step_bytes=step_bytes), decay),
        "adamw": optax.chain(adam, decay),
        "adamw_no_decay": adam,
        "balanced": optax.set_to_zero(),
    }
    rate = schedule(config, steps)
    chain = optax.chain(
        _partition(groups, labels),
        optax.scale_by_learning_rate(rate),
        qk_clip(config.qk_clip, clips, mla_rows),
    )
    return _skippable(_at_least_float32(chain))


def update_rms(updates: dict[str, jax.Array], declared: Mapping[str, Declaration]) -> dict[str, jax.Array]:
    """Root mean square of the updates of each group of parameters that has any, `Balanced` ones apart.

    Sharded updates are summed where they lie; only sums cross the mesh.
    """
    squares: dict[str, list[jax.Array]] = {}
    sizes: dict[str, int] = {}
    for path, value in updates.items():
        label = rule_label(declared[path].rule)
        if label != "balanced":
            value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            squares.setdefault(label, []).append(jnp.sum(value * value))
            sizes[label] = sizes.get(label, 0) + value.size
    return {label: jnp.sqrt(sum(parts, jnp.zeros(())) / float(sizes[label])) for label, parts in squares.items()}


class OptimRow(NamedTuple):
    path: str
    shape: tuple[int, ...]
    rule: str
    block: tuple[int, int] | None
    """Rows and columns of one matrix, for Muon."""
    blocks: int
    """Matrices in the parameter; zero for other rules."""
    clip: QKClip | None


def table(declared: Mapping[str, Declaration]) -> list[OptimRow]:
    """How the optimizer sees each parameter, in the order of `declared`."""
    rows = []
    for path, each in declared.items():
        block, blocks = None, 0
        if isinstance(each.rule, Muon):
            blocks, height, width = block_shape(each.shape, each.rule)
            block = (height, width)
        rows.append(OptimRow(path, each.shape, rule_label(each.rule), block, blocks, each.clip))
    return rows
