"""One step of training as a pure function: gradients, optimizer, expert balancing, and the decision to skip it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from kimi_jax.config import Config, Source
from kimi_jax.model.kimi import Kimi, bias_layers, clip_rows, declared, init
from kimi_jax.model.param import arrays, exact_dtype, shapes, with_arrays
from kimi_jax.ops.routing import balance_metrics, quantile_bias, sign_bias
from kimi_jax.optim.build import build, update_rms
from kimi_jax.optim.schedule import schedule
from kimi_jax.parallel.mesh import current_mesh
from kimi_jax.parallel.spec import spec_of

WINDOW = 64
"""Accepted losses whose median a new loss is compared with."""

Batch = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step reads and writes; what a checkpoint holds."""

    step: jax.Array
    """int32: finished steps, skipped ones included."""
    params: dict[str, jax.Array]
    """Dotted path -> array, the router's correction biases among them."""
    opt: Any
    losses: jax.Array
    """`[WINDOW]` f32: the last accepted losses, NaN where there are none yet."""
    skips: jax.Array
    """int32: steps skipped in a row."""
    skipped: jax.Array
    """int32: steps skipped in all."""
    rng: jax.Array
    """Key data of the run's random numbers, of which training draws none so far."""


def init_state(
    config: Config, optimizer: optax.GradientTransformationExtraArgs, params: dict[str, jax.Array] | None = None
) -> State:
    """The state before the first step, on the current mesh: a function of the config alone, or of given parameters."""
    if params is None:
        params = arrays(init(config.model, config.train.seed, config.rules))
    return jax.jit(partial(_first_state, config, optimizer))(params)


def abstract_state(config: Config, optimizer: optax.GradientTransformationExtraArgs) -> State:
    """`init_state` as shapes with their shardings on the current mesh, without allocating."""
    params = shapes(declared(config.model), config.rules)
    state = jax.eval_shape(partial(_first_state, config, optimizer), params)
    mesh = current_mesh()
    if mesh is None:
        return state
    # Types name an abstract mesh; what is to be allocated needs the devices.
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x))), state
    )


def _first_state(config: Config, optimizer: optax.GradientTransformationExtraArgs, params: dict) -> State:
    return State(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt=optimizer.init(params),
        losses=jnp.full(WINDOW, jnp.nan, jnp.float32),
        skips=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        rng=jax.random.key_data(jax.random.key(config.train.seed)),
    )


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run, from what the model's parameters declare."""
    rows = clip_rows(config.model)
    return build(config.optim, declared(config.model), steps=config.train.steps, mla_rows=rows)


def make_step(
    config: Config, optimizer: optax.GradientTransformationExtraArgs
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """Builds `step(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    The batch's arrays are `[rows, t]`; with `train.accumulation` n they are taken as n micro-batches, whose summed
    gradients are divided by the summed loss weights once, and whose expert counts are pooled. A balance loss of
    documents is a mean over all real tokens, whatever their weights, added to the mean loss. The step is skipped,
    so that parameters, optimizer and biases stay as they were, when the loss or the gradient's norm is not finite,
    or when, after warmup, the loss exceeds the running median by `train.spike_threshold`.
    """
    template = Kimi(config.model)
    biases = bias_layers(config.model)
    begin, steps = config.optim.schedule_from, config.train.steps
    warmup = begin + round(config.optim.warmup_fraction * (steps - begin))
    rate = schedule(config.optim, steps)

    def micro_sums(params, batch, per_token):
        """Gradient of the summed loss, and sums over a micro-batch; `per_token`: the step's weights over its tokens."""

        def summed_loss(params):
            model = with_arrays(template, params)
            x, aux = model.hidden(batch["tokens"], batch["segment_ids"])
            loss, weight = model.loss(x, batch["targets"], batch["loss_weights"])
            aux = {name: aux[name] for name in ("max_logits", "load", "histogram", "balance_loss") if name in aux}
            balance = per_token * jnp.sum(aux["balance_loss"]) if "balance_loss" in aux else 0
            return loss + balance, {"loss": loss, "weight": weight, **aux}

        grads, sums = jax.grad(summed_loss, has_aux=True)(params)
        return {"grads": grads, **sums}

    def pool(a, b):
        return {key: jnp.maximum(a[key], b[key]) if key == "max_logits" else _add(a[key], b[key]) for key in a}

    def batch_sums(params, batch):
        parts = config.train.accumulation
        weights = batch["loss_weights"].astype(exact_dtype(jnp.dtype(config.model.dtype)))
        per_token = jnp.sum(weights) / jnp.maximum(jnp.sum(batch["segment_ids"] > 0), 1)
        if parts == 1:
            return micro_sums(params, batch, per_token)
        # Each device takes its micro-batches from its own rows, so none of them moves.
        batch = {key: jnp.moveaxis(value.reshape(-1, parts, *value.shape[1:]), 1, 0) for key, value in batch.items()}
        shapes = jax.eval_shape(micro_sums, params, {key: value[0] for key, value in batch.items()}, per_token)
        zero = jax.tree.map(jnp.zeros_like, shapes)
        zero["grads"] = _widened(zero["grads"])  # what micro-batches are added up in
        zero["max_logits"] = jnp.full_like(zero["max_logits"], -jnp.inf)
        add = lambda sums, micro: (pool(sums, micro_sums(params, micro, per_token)), None)  # noqa: E731
        return jax.lax.scan(add, zero, batch)[0]

    def balanced(params, sums):
        """The parameters with each layer's correction bias moved by its pooled counts."""
        moved = dict(params)
        for name, layers in biases.items():
            rows, bias = layers - config.model.num_dense_layers, params[name]
            if config.optim.balance == "quantile":
                move = jax.vmap(jax.vmap(lambda c, b: quantile_bias(c, b, k=config.model.moe.experts_per_token)))
                moved[name] = move(sums["histogram"][rows], bias)
            else:
                move = jax.vmap(jax.vmap(lambda load, b: sign_bias(load, b, rate=config.optim.balance_rate)))
                moved[name] = move(sums["load"][rows], bias)
        return moved

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        batch = dict(batch)
        num_bytes = jnp.sum(jnp.where(batch["loss_weights"] > 0, batch.pop("num_bytes"), 0))
        sums = batch_sums(state.params, batch)
        weight = jnp.maximum(sums["weight"], 1)
        loss = sums["loss"] / weight
        # Divided and squared in at least f32, but kept as they are: gradients of bf16 parameters are as large as these.
        grads = sums["grads"]
        grads = {name: (wide / weight).astype(grads[name].dtype) for name, wide in _widened(grads).items()}
        grad_norm = optax.tree.norm(_widened(grads))
        median = jnp.nanmedian(state.losses)
        spike = (state.step >= warmup) & (loss > median + config.train.spike_threshold)  # false while median is NaN
        accept = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & ~spike

        # Widened after this: XLA would else do it to all gradients at once, while it takes their norm.
        grads, accept = jax.lax.optimization_barrier((grads, accept))
        logits = sums["max_logits"]
        updates, opt = optimizer.update(grads, state.opt, state.params, max_logits=logits, accept=accept)
        params = balanced(optax.apply_updates(state.params, updates), sums)
        new = State(
            step=state.step + 1,
            params=_where(accept, params, state.params),
            opt=opt,
            losses=jnp.where(
                accept, jnp.roll(state.losses, -1).at[-1].set(loss.astype(state.losses.dtype)), state.losses
            ),
            skips=jnp.where(accept, 0, state.skips + 1),
            skipped=state.skipped + ~accept,
            rng=state.rng,
        )
        metrics = {
            "loss": loss,
            "bits_per_byte": sums["loss"] / (np.log(2) * jnp.maximum(num_bytes, 1)),
            "tokens": sums["weight"],
            "learning_rate": rate(state.step - state.skipped),  # the optimizer counts accepted steps
            "grad_norm": grad_norm,
            "skipped": new.skipped,
            "skips_in_a_row": new.skips,
            **{f"update_rms_{label}": rms for label, rms in update_rms(updates, declared(config.model)).items()},  # type: ignore[arg-type]
        }
        if sums["max_logits"].size:
            metrics["max_logit"] = jnp.max(sums["max_logits"])
        if "balance_loss" in sums:
            metrics["balance_loss"] = jnp.sum(sums["balance_loss"]) / jnp.maximum(jnp.sum(batch["segment_ids"] > 0), 1)
        if "load" in sums:
            layers = jax.vmap(balance_metrics)(sums["load"])
            metrics["max_violation"] = jnp.max(layers["max_violation"])
            metrics["router_entropy"] = jnp.min(layers["entropy"])
            metrics["dead_experts"] = jnp.max(layers["dead_experts"])
            metrics["expert_load"] = sums["load"]
        return new, metrics

    return step


def make_eval_step(config: Config) -> Callable[[dict[str, jax.Array], Batch], tuple[jax.Array, jax.Array]]:
    """Builds `eval_step(params, batch) -> (summed nats, summed weights)`; it changes nothing, biases included."""
    template = Kimi(config.model)

    def eval_step(params, batch):
        model = with_arrays(template, params)
        x, _ = model.hidden(batch["tokens"], batch["segment_ids"])
        return model.loss(x, batch["targets"], batch["loss_weights"])

    return eval_step


def _widened(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value.astype(exact_dtype(value.dtype)) for name, value in values.items()}


def _where(condition, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _add(a, b):
    return jax.tree.map(jnp.add, a, b)


def _unnamed(config: Config) -> Config:
    """The config without what no compiled function depends on, so that runs in one process share them."""
    data = replace(config.data, sources=(Source(),), validation=())
    return replace(config, name="any", data=data, train=replace(config.train, qat_from_step=None))


@lru_cache(maxsize=8)
def _jitted_step(config: Config):
    return jax.jit(make_step(config, make_optimizer(config)), donate_argnums=0)


@lru_cache(maxsize=8)
def _jitted_eval_step(config: Config):
    return jax.jit(make_eval_step(config))


def training_step(config: Config):
    """The jitted `step(state, batch)` of a config; it takes the state's memory for its own."""
    return _jitted_step(_unnamed(config))


def evaluation_step(config: Config):
    """The jitted `eval_step(params, batch)` of a config."""
    return _jitted_eval_step(_unnamed(config))
