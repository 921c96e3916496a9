"""Per-device code with collectives, for use inside `jax.shard_map`; this folder re-exports nothing."""
