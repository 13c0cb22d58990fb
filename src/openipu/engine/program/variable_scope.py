"""What a function that is traced into a program changes: Keras variables, and the places of feeds.

A `VariableScope` stands between Keras variables and their users: reading gives the traced value, assigning keeps the
new one.
Scopes nest as loops do; what one does not know, its parent does. Afterwards it tells what was read and assigned.

[Note: JAX's own loops] Inside `jax.lax.fori_loop`, `jax.grad`, `jax.jit` and the like, values belong to a program of
their own, and a scope around it must not keep them. What changes a variable there is an error, at once and in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from openipu.engine.types import Tree

import keras
from jax.extend.core import get_opaque_trace_state


class VariableScope(keras.StatelessScope):
    """Values of variables and cells while a function is traced.

    A cell is a tree of arrays that belongs to a feed and not to Keras: it is found by its owner.
    """

    def __init__(
        self,
        parent: VariableScope | None = None,
        values: Iterable[tuple[Any, Any]] = (),
        cells: Iterable[tuple[Any, Tree]] = (),
        unknown: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(collect_losses=True)
        self._parent, self._unknown = parent, unknown
        self._where: Any = None
        self.state_mapping = {id(variable): value for variable, value in values}
        self._cells: dict[int, Tree] = {id(owner): cell for owner, cell in cells}
        self.read: dict[int, Any] = {}
        """Variables that were read."""
        self.assigned: dict[int, Any] = {}
        """Variables that got a new value."""
        self.touched: dict[int, Any] = {}
        """Owners of cells that got a new value."""

    def __enter__(self) -> VariableScope:
        self.belongs_here()
        super().__enter__()
        return self

    def belongs_here(self) -> None:
        """Changes are made where JAX traces now. See [Note: JAX's own loops]."""
        self._where = _where()

    def get_current_value(self, variable: Any) -> Any:
        """The traced value; Keras calls this whenever a variable is read."""
        self.read[id(variable)] = variable
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return value
        if self._parent is not None:
            return self._parent.get_current_value(variable)
        return self._unknown(variable) if self._unknown is not None else None

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keep a new value; Keras calls this whenever a variable is assigned."""
        variable, value = update
        self._check(f"The Keras variable {variable.path!r} is assigned")
        self.assigned[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def cell(self, owner: Any) -> Tree:
        """The cell of `owner`."""
        cell = self._cells.get(id(owner))
        return self._parent.cell(owner) if cell is None and self._parent is not None else cell

    def set_cell(self, owner: Any, cell: Tree) -> None:
        """A new value for the cell of `owner`."""
        self._check("A feed is used")
        self.touched[id(owner)] = owner
        self._cells[id(owner)] = cell

    def _check(self, what: str) -> None:
        if self._where != _where():
            raise RuntimeError(
                f"{what} inside one of JAX's own loops, conditionals or gradients, which do not carry it along. Use "
                "`repeat`, `while_loop` and `cond` of `ipu.loops`, and `ipu.training.gradients`."
            )

    def adopt(self, child: VariableScope) -> None:
        """Take over what a child has changed."""
        for variable in child.assigned.values():
            self.add_update((variable, child.state_mapping[id(variable)]))
        for owner in child.touched.values():
            self.set_cell(owner, child.cell(owner))


def _where() -> Any:
    return get_opaque_trace_state(convention="flax")
