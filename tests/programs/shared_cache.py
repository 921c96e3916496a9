"""Imported first: makes the processes of a test share what one of them has compiled."""

import jax
import jax._src.cache_key as keys

# A CPU's topology names the process, so that two processes would each compile every program, at each start.
if hasattr(keys, "_hash_accelerator_config"):
    keys._hash_accelerator_config = keys._hash_devices
    jax.config.update("jax_share_binary_between_hosts", True)
    jax.config.update("jax_share_binary_between_hosts_timeout_ms", 300_000)
