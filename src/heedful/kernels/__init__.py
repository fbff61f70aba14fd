"""The fast path beside the plain one: `kernels.accelerate(model, "inference" | "training")`.

`nn` and `models` import nothing from here; delete this package and every result stays the same, to within rounding.
"""

from heedful.kernels.accelerate import accelerate, restore

__all__ = ["accelerate", "restore"]
