"""How the optimizer sees a parameter: the rules that `param` declares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Muon:
    """Per-head Muon: axes `rows` x `cols`, each flattened, are a matrix; all other axes count its blocks."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]


@dataclass(frozen=True)
class AdamW:
    decay: bool


@dataclass(frozen=True)
class Balanced:
    """The router's correction bias: no gradient; moved once a step by the expert counts."""


@dataclass(frozen=True)
class QKClip:
    """How QK-Clip scales a query or key weight: axis -2 is heads; along axis -1, `parts` gives widths and the
    exponent of the head's clip factor gamma (K2 report, section 2.1)."""

    parts: tuple[tuple[int, float], ...]


Rule = Muon | AdamW | Balanced
