"""How glibc keeps memory that was freed. Other C libraries have no `mallopt`, and are left as they are."""

import ctypes

_MALLOPT = {"arena_max": -8, "mmap_threshold": -3, "trim_threshold": -1}  # malloc.h


def tune(**options: int) -> None:
    """Sets parameters of glibc's mallopt, by their names in mallopt(3) in lower case without M_."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for name, value in options.items():
        mallopt(_MALLOPT[name], value)


def keep_freed() -> None:
    """Keeps XLA's temporaries mapped between steps on CPU.

    glibc hands large blocks back to the kernel when they are freed; a step that takes them again spends a quarter of
    its time on page faults. It keeps as many arenas as it likes: with one, the threads of emulated devices wait for
    each other (`benchmarks/moe.py` then takes 1.5 times as long).
    """
    largest = 2**31 - 1
    tune(mmap_threshold=largest, trim_threshold=largest)
