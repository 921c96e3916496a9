"""Kimi K3, Kimi Linear and K2 in JAX."""
