"""Files, and hashes of what they hold. Imports nothing of ours."""

from __future__ import annotations

from hashlib import blake2b


def unit_hash(key: str) -> float:
    """A number in [0, 1) that depends on the key alone, on every machine alike.

    >>> round(unit_hash("abc.py"), 4)
    0.8085
    """
    return int.from_bytes(blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48
