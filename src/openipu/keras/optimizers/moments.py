"""What Adam and LAMB share: moving means of gradients and of their squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array

import keras
from jax.typing import DTypeLike

from .base import IpuOptimizerBase, slot_dtype


class MomentOptimizer(IpuOptimizerBase):
    """An optimizer with moving means of gradients and of their squares for each weight."""

    def set_moments(
        self,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        debiasing: bool,
        m_dtype: DTypeLike | None,
        v_dtype: DTypeLike | None,
    ) -> None:
        """Check and keep the arguments that concern the means."""
        self.beta_1 = validate.number("beta_1", beta_1, least=0.0, below=1.0)
        self.beta_2 = validate.number("beta_2", beta_2, least=0.0, below=1.0)
        self.epsilon = validate.number("epsilon", epsilon, least=0.0)
        self.debiasing = validate.flag("debiasing", debiasing)
        self.m_dtype, self.v_dtype = slot_dtype("m_dtype", m_dtype), slot_dtype("v_dtype", v_dtype)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        self._m = self.add_slots(variables, "momentum", self.m_dtype)
        self._v = self.add_slots(variables, "velocity", self.v_dtype)

    def moments(self, gradient: Array, variable: keras.Variable) -> tuple[Array, Array]:
        """The means of gradients and of their squares, after this gradient."""
        m = self.averaged(self.slot(self._m, variable), gradient, self.beta_1)
        return m, self.averaged(self.slot(self._v, variable), gradient * gradient, self.beta_2)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        own = ("beta_1", "beta_2", "epsilon", "debiasing", "m_dtype", "v_dtype")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}
