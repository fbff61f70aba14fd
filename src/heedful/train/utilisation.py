"""Model FLOPs utilisation of a training (Chowdhery et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from heedful.data.dataset import count_tokens
from heedful.models.base import Batch, Model
from heedful.train import cost
from heedful.train.objectives import Objective


class UtilisationMeter:
    """The rate of a training as a share of the device's peak rate of matrix products, measured when first asked for."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        device: torch.device,
        precision: str,
        report: Callable[[str], None],
        *,
        copyable: bool = True,
    ) -> None:
        """`copyable`: whether the model can be copied; of a sharded or compiled one its config is taken instead."""
        self.model, self.objective, self.device, self.report = model, objective, str(device), report
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.copyable = copyable
        self.peak: float | None = None  # tokens per second; NaN if it cannot be known

    def utilisation(self, tokens_per_second: float, batch: Batch) -> float | None:
        """The share of the peak with batches like this one, None if FLOPs cannot be counted. A rate above the measured
        peak, of a machine that was busy then, is the better measurement."""
        if self.peak is None:
            self.peak = self._peak(cost.take_rows(batch, 1))
        if math.isnan(self.peak):
            return None
        self.peak = max(self.peak, tokens_per_second)
        return tokens_per_second / self.peak

    def _peak(self, batch: Batch) -> float:
        model = self.model if self.copyable else type(self.model).create(self.model.config, device="meta")
        try:
            flops = cost.count_flops(model, self.objective, batch).training / max(1, count_tokens(batch))
        except Exception as error:  # an operator that fake tensors lack: no reason to end a training
            self.report(f"utilisation is not known: counting FLOPs failed ({type(error).__name__}: {error})")
            return math.nan
        return cost.peak_rate(self.device, self.dtype) / max(1.0, flops)
