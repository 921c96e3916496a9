"""The sigmoid router, and the rules that keep its experts evenly loaded."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops.situ import sigmoid


class Routing(NamedTuple):
    """Where tokens go."""

    indices: jax.Array
    """[n, k] int32 chosen experts, best first."""
    weights: jax.Array
    """[n, k] their weights, at least float32."""
    scores: jax.Array
    """[n, e] scores without bias, at least float32."""
    threshold: jax.Array
    """[n] biased score of the best expert that was not chosen; carries no gradient."""


def choose(scores: jax.Array, bias: jax.Array, *, k: int) -> tuple[jax.Array, jax.Array]:
    """The k experts with the best biased scores, and the score that just missed. Not differentiated.

    Args:
      scores: [n, e].
      bias: [e].
      k: experts a token, fewer than e.

    Returns:
      indices [n, k] int32, best first and equal ones by rising index; threshold [n], the (k+1)-th biased score.
    """
    biased = jax.lax.stop_gradient(scores + bias.astype(scores.dtype))
    # Barriers keep XLA from merging the slices below into the top-k, which makes it a full sort: 20 times slower. One
    # for each result: a barrier on both ends XLA:CPU's compiler where it partitions for several devices.
    best, order = map(jax.lax.optimization_barrier, jax.lax.top_k(biased, k + 1))
    return order[:, :k], best[:, k]


def route(
    x: jax.Array,
    w_router: jax.Array,
    bias: jax.Array,
    *,
    k: int,
    renormalize: bool,
    scaling_factor: float,
) -> Routing:
    """Chooses k experts a token by biased score, and weights them by the score alone.

    s = sigmoid(x w_router),  chosen = top-k(s + bias),  weight_j = scaling_factor * s_j / (sum_chosen s + 1e-20)

    Without `renormalize`, or with k = 1, the sum is left out; the scaling factor applies in every case. Inputs are
    widened before the matmul: scores a rounding apart decide which expert runs. Equal scores go to the lower index.
    Gradients flow through the weights only: none to the bias, none through the choice.

    Args:
      x: [n, d] tokens at the model's full width.
      w_router: [d, e].
      bias: [e] correction bias.
      k: experts a token, fewer than e.
      renormalize: make a token's weights sum to one before scaling.
      scaling_factor: Kimi Linear 2.446, K3 1.

    Returns:
      Routing.

    Raises:
      ValueError: k is not smaller than the number of experts.

    Source: K3 report, section 2; the router in the released `modeling_kimi_linear.py`.
    """
    num_experts = w_router.shape[1]
    if not 1 <= k < num_experts:
        raise ValueError(f"k={k} experts a token must be at least 1 and smaller than num_experts={num_experts}")
    wide = jnp.promote_types(jnp.promote_types(x.dtype, w_router.dtype), jnp.float32)
    scores = sigmoid(jnp.matmul(x.astype(wide), w_router.astype(wide), precision="highest"))
    indices, threshold = choose(scores, bias, k=k)
    # A row's experts differ, and saying so makes the gradient a scatter without collisions: deterministic.
    rows = jnp.arange(x.shape[0])[:, None]
    weights = scores.at[rows, indices].get(mode="promise_in_bounds", unique_indices=True)
    if renormalize and k > 1:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(indices, weights * scaling_factor, scores, threshold)


def expert_load(indices: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """Counts the real tokens that each expert receives.

    Args:
      indices: [n, k] chosen experts.
      mask: [n] bool, False for padding.
      num_experts: e.

    Returns:
      [e] int32.
    """
    chosen = jnp.where(mask[:, None], indices, num_experts).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[chosen].add(1, mode="drop")


def _histogram_range(bias: jax.Array, bins: int) -> tuple[jax.Array, jax.Array]:
    low, high = jnp.min(bias) - 1, jnp.max(bias) + 1
    return low, (high - low) / bins


def quantile_histogram(
    scores: jax.Array,
    threshold: jax.Array,
    bias: jax.Array,
    mask: jax.Array,
    *,
    bins: int = 1000,
) -> jax.Array:
    """Counts, per expert, how far its raw score is from what it takes to be chosen.

    r_ij = threshold_i - s_ij, in `bins` equal bins over [min(bias) - 1, max(bias) + 1], which holds all of them.

    Expert j would take token i with any bias above r_ij. The range follows the bias with which the tokens were
    routed, so counts of the micro-batches (and devices) of one step add up: sum them, then call `quantile_bias`
    once. Not differentiated.

    Args:
      scores: [n, e] raw scores.
      threshold: [n] from `route`.
      bias: [e] the bias that `route` had.
      mask: [n] bool, False for padding.
      bins: number of bins.

    Returns:
      [e, bins] int32.

    Source: K3 report, Eq. 13 and appendix D.
    """
    scores, threshold, bias = jax.lax.stop_gradient((scores, threshold, bias.astype(scores.dtype)))
    num_experts = scores.shape[1]
    low, width = _histogram_range(bias, bins)
    # With equal biases the best expert that was not chosen has r = 0, which is a bin's edge, and r may be a rounding
    # off where XLA computes a score twice: edges a little lower keep counts the same on all devices.
    place = jnp.floor((threshold[:, None] - scores - low) / width + 7e-5)
    place = jnp.clip(place, 0, bins - 1).astype(jnp.int32) + bins * jnp.arange(num_experts, dtype=jnp.int32)
    place = jnp.where(mask[:, None], place, num_experts * bins).reshape(-1)
    return jnp.zeros(num_experts * bins, jnp.int32).at[place].add(1, mode="drop").reshape(num_experts, bins)


def quantile_bias(counts: jax.Array, bias: jax.Array, *, k: int) -> jax.Array:
    """Quantile Balancing: the bias with which each expert would have received its even share of the tokens.

    b_j = the (k / e) quantile of r_ij over tokens i, interpolated inside its bin; then b -= mean(b)

    The sign matters: an overloaded expert has small r and gets a lower bias. No rate and no auxiliary loss.

    Args:
      counts: [e, bins] from `quantile_histogram`, summed over the global batch.
      bias: [e] the bias those tokens were routed with; it is returned when there were none.
      k: experts a token.

    Returns:
      [e] in bias.dtype, mean zero: the bias of the next step.

    Source: K3 report, Eq. 14 and appendices C and D (the quantile of threshold - s, with its sign).
    """
    num_experts, bins = counts.shape
    m = jnp.sum(counts[0])
    # q = m k / e in integers and a remainder: neither overflow nor rounding at millions of tokens.
    whole, rest = (m // num_experts) * k, (m % num_experts) * k
    whole, rest = whole + rest // num_experts, rest % num_experts
    cumulative = jnp.cumsum(counts, axis=1)
    place = jnp.argmax(cumulative >= whole + (rest > 0), axis=1)[:, None]
    inside = jnp.take_along_axis(counts, place, axis=1)[:, 0]
    before = jnp.take_along_axis(cumulative, place, axis=1)[:, 0] - inside
    fraction = ((whole - before) + rest.astype(bias.dtype) / num_experts) / jnp.maximum(inside, 1)
    low, width = _histogram_range(bias, bins)
    raw = low + (place[:, 0] + jnp.clip(fraction, 0, 1)) * width
    return jnp.where(m > 0, raw - jnp.mean(raw), bias).astype(bias.dtype)


def sign_bias(load: jax.Array, bias: jax.Array, *, rate: float) -> jax.Array:
    """The older rule: a fixed step towards an even load, b += rate * sign(mean(load) - load).

    Args:
      load: [e] integers, the tokens that each expert received in the step.
      bias: [e].
      rate: the step (DeepSeek-V3 and K2: 1e-3).

    Returns:
      [e] in bias.dtype.

    Source: DeepSeek-V3 report (arXiv 2412.19437), section 2.1.2.
    """
    # In integers, as float32 cannot tell loads above 2^24 apart, and without the sum, which may not fit in 32 bits:
    # mean(load) = quotient + rest / e with 0 <= rest < e.
    num_experts = load.size
    quotient, rest = jnp.sum(load // num_experts), jnp.sum(load % num_experts)
    quotient, rest = quotient + rest // num_experts, rest % num_experts
    direction = jnp.where(load == quotient, jnp.sign(rest), jnp.sign(quotient - load))
    return bias + (rate * direction).astype(bias.dtype)


def document_balance_loss(
    scores: jax.Array, documents: jax.Array, chosen: jax.Array, row_documents: jax.Array
) -> jax.Array:
    """DeepSeek-V3's balance loss of each sequence, summed over the tokens of all sequences.

    T sum_j f_j P_j,  f_j = e / (k T) #{t: s_tj among the k best of s_t},  P_j = 1 / T sum_t s_tj / sum_i s_ti

    A document of T tokens is a sequence, so that a packed row is worth its documents one by one. Divided by the
    number of tokens it is their mean, 1 when even. Gradients flow through P only.

    Args:
      scores: [b, t, e] without bias, of rows or of one span of each.
      documents: [b, t] numbers (`segments.document_ids`), 0 for padding: what scores hold there has no effect.
      chosen: [b, T, k] int, `best_experts` of the full rows.
      row_documents: [b, T] of the full rows.

    Returns:
      A scalar in scores' dtype; of spans, it is to be summed.

    Source: DeepSeek-V3 report (arXiv 2412.19437), eqs. 17-20.
    """
    b, t, e = scores.shape
    # Counts [b, t, e] by a document's place among those with a token here, of which there are at most t.
    first = jnp.min(jnp.where(documents > 0, documents, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    place = jnp.where(row_documents >= first, row_documents - first, t)[..., None]
    counts = jnp.zeros((b, t, e), jnp.int32).at[jnp.arange(b)[:, None, None], place, chosen].add(1, mode="drop")
    real = (documents > 0)[..., None]
    counts = jnp.take_along_axis(counts, jnp.where(real, (documents - first)[..., None], 0), axis=1)
    f = e * counts.astype(scores.dtype) / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
    scores = jnp.where(real, scores, 1)
    return jnp.sum(jnp.where(real, f * scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20), 0))


def best_experts(scores: jax.Array, *, k: int) -> jax.Array:
    """[.., e] -> [.., k] int32: the experts with the best scores, no bias added. Not differentiated."""
    return jax.lax.top_k(jax.lax.stop_gradient(scores), k)[1]


def balance_metrics(load: jax.Array) -> dict[str, jax.Array]:
    """How even a load is.

    Args:
      load: [e] tokens that each expert received.

    Returns:
      max_violation: max(load) / mean(load) - 1, 0 when even.
      entropy: of the shares, over log e: 1 when even, 0 when one expert takes all.
      dead_experts: experts without a token.
      All are 0 (and every expert is dead) when there were no tokens.
    """
    counts = load.astype(jnp.float32)
    total = jnp.sum(counts)
    share = counts / jnp.maximum(total, 1)
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1))) / jnp.log(jnp.float32(max(load.size, 2)))
    return {
        "max_violation": jnp.where(total > 0, jnp.max(share) * load.size - 1, 0.0),
        "entropy": entropy,
        "dead_experts": jnp.sum(load == 0),
    }
