"""Optional fast implementations: `kernels.accelerate(model, "inference" | "training")`.

`nn` and `models` import nothing from here; without this package every result is the same, to within rounding.
"""

from heedful.kernels.accelerate import accelerate, restore

__all__ = ["accelerate", "restore"]
