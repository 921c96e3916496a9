"""See the modules of this folder; it re-exports nothing."""
