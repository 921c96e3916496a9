"""All that the tests take of JAX and XLA beside their public interfaces, each with its reason and its fallback.

`test_jax_private.py` fails where JAX is newer than what this was checked with.
"""

import importlib.metadata

CHECKED = (0, 10)
"""The newest jax and jaxlib, `(major, minor)`, with which each of these was seen to work."""


def version_of(package: str) -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


# Of XLA's two ways to write a fusion's code for CPUs, the default runs some 20 MLIR passes over each: half of the time
# to compile. XLA ends the process when it meets a flag that it does not know, and may drop this one at any time.
QUICK = {"xla_cpu_use_fusion_emitters": False}


def quick_xla_flags(flags: str) -> str:
    """The value of XLA_FLAGS with QUICK added, if this XLA is known to have it."""
    if version_of("jaxlib") > CHECKED:
        return flags
    missing = (f"--{name}={str(value).lower()}" for name, value in QUICK.items() if name not in flags)
    return " ".join([*filter(None, [flags]), *missing])


def default_fusions() -> dict[str, bool]:
    """`compiler_options` of a jit whose program's last bits are compared with another's: XLA's default fusions."""
    return {} if version_of("jaxlib") > CHECKED else dict.fromkeys(QUICK, True)


def share_compiled_programs_between_processes() -> None:
    """Makes the processes of one run share what one of them has compiled.

    A CPU's topology names the process, and is part of the key of JAX's compilation cache: two processes would each
    compile every program, at each start. JAX has no setting for the key.
    """
    import jax
    import jax._src.cache_key as keys

    if version_of("jax") <= CHECKED:
        keys._hash_accelerator_config = keys._hash_devices
        jax.config.update("jax_share_binary_between_hosts", True)
        jax.config.update("jax_share_binary_between_hosts_timeout_ms", 300_000)
