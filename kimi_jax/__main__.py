"""`python -m kimi_jax` is the `kimi-jax` command."""

from kimi_jax.cli import main

main()
