"""Learning rates as functions of the step: each is a factor that the optimizer's own rate is multiplied with.

    warm-up       (s + 1) / w up to 1                          every schedule's beginning
    constant      1
    linear        1 -> final, straight                         BERT's (Devlin et al. 2019, appendix A.2)
    cosine        final + (1 - final) (1 + cos πt) / 2         Loshchilov & Hutter 2017, equation 5
    wsd           1, and over the last `decay` share of        MiniCPM (Hu et al. 2024); decays straight, as
                  all steps straight to final                  Hägele et al. 2024
    inverse_sqrt  √(w / (s + 1))                               Vaswani et al. 2017, equation 3, its highest value as 1

s is the step that is about to be taken, counted from 0; w the steps of warm-up; t goes from 0 at s = w to 1 at the end
of training, s = n, where `final` would be reached: the last step taken, n - 1, still learns when final is 0.
"""

from __future__ import annotations

import math

from heedful.train.recipe import ScheduleSettings


def factor(settings: ScheduleSettings, step: int, steps: int) -> float:
    """The factor of step `step`, counted from 0, in a training of `steps`."""
    name, warmup = settings.name, settings.warmup
    if name == "inverse_sqrt":
        peak = max(warmup, 1)
        return min((step + 1) / peak, math.sqrt(peak / (step + 1)))
    if step < warmup:
        return (step + 1) / warmup
    if name == "constant":
        return 1.0
    begin = max(warmup, (1 - settings.decay) * steps) if name == "wsd" else warmup
    progress = min(max((step - begin) / max(steps - begin, 1), 0.0), 1.0)
    if name == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    else:
        assert name in ("linear", "wsd"), f"no schedule is called {name}"
    return 1 - (1 - settings.final) * progress
