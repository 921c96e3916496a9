"""Slow oracles in NumPy float64, written from the equations: loops in place of tricks."""

import numpy as np


def f64(x):
    return np.asarray(x, np.float64)


def sigmoid(x):
    x = f64(x)
    tail = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, tail) / (1 + tail)


def silu(x):
    return f64(x) * sigmoid(x)


def rms_norm(x, weight, eps):
    x = f64(x)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * f64(weight)


def l2_norm(x, eps=1e-6):
    x = f64(x)
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + eps)


def situ_glu(gate, up, beta, linear_beta):
    gate, up = f64(gate), f64(up)
    capped = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * capped


def attn_residual(sources, query, gain, eps):
    """sources [n, ..., d] -> (mixture [..., d], probabilities [n, ...])."""
    sources = f64(sources)
    keys = rms_norm(sources, 1.0, eps)
    score = np.sum(keys * (f64(gain) * f64(query)), axis=-1)
    part = np.exp(score - score.max(axis=0))
    probs = part / part.sum(axis=0)
    return np.sum(probs[..., None] * sources, axis=0), probs


def documents(segment_ids):
    """One row of ids -> list of arrays of positions, one per document: a maximal run of one id >= 1."""
    runs, previous = [], 0
    for place, name in enumerate(np.asarray(segment_ids)):
        if name > 0:
            if name == previous:
                runs[-1].append(place)
            else:
                runs.append([place])
        previous = name
    return [np.array(run) for run in runs]


def short_conv(x, weight, tail=None, segment_ids=None):
    """x [b, t, c], weight [c, w], tail [b, w-1, c] -> (y, new_tail), document by document."""
    x, weight = f64(x), f64(weight)
    b, t, c = x.shape
    before = weight.shape[-1] - 1
    tail = np.zeros((b, before, c)) if tail is None else f64(tail)
    ids = np.ones((b, t), int) if segment_ids is None else np.asarray(segment_ids)
    y, new_tail = np.zeros_like(x), tail.copy()
    for row in range(b):
        for number, places in enumerate(documents(ids[row])):
            history = tail[row] if number == 0 else np.zeros((before, c))
            inputs = np.concatenate([history, x[row, places]])
            for i, place in enumerate(places):
                y[row, place] = silu(np.sum(inputs[i : i + before + 1] * weight.T, axis=0))
            new_tail[row] = inputs[len(inputs) - before :]
    return y, new_tail


def attention(q, k, v, scale, q_documents=None, kv_documents=None, q_start=0):
    """One query at a time -> (o [b, t, h, v], max_logits [h])."""
    q, k, v = f64(q), f64(k), f64(v)
    b, t, h, _ = q.shape
    s, g = k.shape[1:3]
    q_documents = np.ones((b, t), int) if q_documents is None else np.asarray(q_documents)
    kv_documents = np.ones((b, s), int) if kv_documents is None else np.asarray(kv_documents)
    o, top = np.zeros((b, t, h, v.shape[-1])), np.full(h, -np.inf)
    for row in range(b):
        for i in range(t):
            seen = [
                j
                for j in range(min(s, q_start + i + 1))
                if kv_documents[row, j] == q_documents[row, i] and q_documents[row, i] > 0
            ]
            if not seen:
                continue
            for head in range(h):
                group = head // (h // g)
                logits = k[row, seen, group] @ q[row, i, head] * scale
                top[head] = max(top[head], logits.max())
                part = np.exp(logits - logits.max())
                o[row, i, head] = part / part.sum() @ v[row, seen, group]
    return o, top


def cross_entropy(logits, targets, weights):
    """logits [n, vocab] -> (sum of weighted nll, sum of weights)."""
    total = 0.0
    for row, target, weight in zip(f64(logits), np.asarray(targets), f64(weights), strict=True):
        if weight != 0:
            total += weight * (np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[target])
    return total, float(np.sum(f64(weights)))


def route(x, w_router, bias, k, renormalize, scaling_factor):
    """-> (indices [n, k], weights [n, k], scores [n, e], threshold [n]); ties go to the lower index."""
    scores = sigmoid(f64(x) @ f64(w_router))
    biased = scores + f64(bias)
    order = np.argsort(-biased, axis=-1, kind="stable")
    indices = order[:, :k]
    weights = np.take_along_axis(scores, indices, axis=-1)
    if renormalize and k > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    threshold = np.take_along_axis(biased, order[:, k : k + 1], axis=-1)[:, 0]
    return indices, weights * scaling_factor, scores, threshold


def quantile_histogram(scores, threshold, bias, bins):
    bias = f64(bias)
    low = bias.min() - 1
    width = (bias.max() - bias.min() + 2) / bins
    margin = f64(threshold)[:, None] - f64(scores)
    place = np.clip(np.floor((margin - low) / width), 0, bins - 1).astype(int)
    return np.stack([np.bincount(column, minlength=bins) for column in place.T])


def exact_quantile_bias(scores, threshold, k):
    """The k/n quantile of each expert's margins, with no histogram between; mean-centred."""
    m, n = scores.shape
    margin = np.sort(f64(threshold)[:, None] - f64(scores), axis=0)
    raw = margin[-(-m * k // n) - 1]
    return raw - raw.mean()


def expert_mlp(x, indices, weights, w_gate, w_up, w_down, activation):
    """Token by token, choice by choice."""
    x, weights = f64(x), f64(weights)
    w_gate, w_up, w_down = f64(w_gate), f64(w_up), f64(w_down)
    out = np.zeros((x.shape[0], w_down.shape[-1]))
    for token, (chosen, share) in enumerate(zip(np.asarray(indices), weights, strict=True)):
        for expert, weight in zip(chosen, share, strict=True):
            hidden = activation(x[token] @ w_gate[expert], x[token] @ w_up[expert])
            out[token] += weight * (hidden @ w_down[expert])
    return out
