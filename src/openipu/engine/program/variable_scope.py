"""Records what a traced function reads and changes: Keras variables, and the cells of feeds.

A `VariableScope` stands between Keras variables and their users: reading returns the traced value, and assigning keeps
the new one. Scopes nest as loops do, and values that a scope does not have come from its parent.

[Note: assigned values] As in TensorFlow, no gradient passes through an assignment: a variable that an optimizer has
updated is a constant for the gradients of what is computed with it later.

[Note: JAX's own loops] Inside `jax.lax.fori_loop`, `jax.grad`, `jax.jit` and the like, values belong to an inner
program, and a scope outside that program must not keep them. Changing a variable there raises an error at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from openipu.engine.core.enqueued import traced_program
from openipu.engine.types import Array, Tree

import keras
from jax import lax


class VariableScope(keras.StatelessScope):
    """The values of variables and cells while a function is traced.

    A cell is a tree of arrays that belongs to a feed, its owner.
    """

    def __init__(
        self,
        parent: VariableScope | None = None,
        values: Iterable[tuple[keras.Variable, Array]] = (),
        cells: Iterable[tuple[object, Tree]] = (),
        unknown: Callable[[keras.Variable], Any] | None = None,
    ) -> None:
        super().__init__(collect_losses=True)
        self._parent, self._unknown = parent, unknown
        self._where: object = None
        self.state_mapping = {id(variable): value for variable, value in values}
        self._cells: dict[int, Tree] = {id(owner): cell for owner, cell in cells}
        # Losses of layers. A branch sees those that were added before it.
        self.losses: list[Any] = [] if parent is None else list(parent.losses)
        self.added: dict[int, keras.Layer] = {}
        """The layers that have added losses here, by the identity of the loss (added_losses.py)."""
        self.read: dict[int, keras.Variable] = {}
        """Variables that were read."""
        self.assigned: dict[int, keras.Variable] = {}
        """Variables that got a new value."""
        self.touched: dict[int, object] = {}
        """Owners of cells that got a new value."""

    def __enter__(self) -> VariableScope:
        self.belongs_here()
        super().__enter__()
        return self

    def belongs_here(self) -> None:
        """Accept changes only from the program that JAX traces now. See [Note: JAX's own loops]."""
        self._where = traced_program()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The traced value. Keras calls this whenever a variable is read."""
        self.read[id(variable)] = variable
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return value
        if self._parent is not None:
            return self._parent.get_current_value(variable)
        return self._unknown(variable) if self._unknown is not None else None

    def snapshot(self) -> dict[int, Any]:
        """The values that variables have now, by their identity, as far as they are known here."""
        known = {} if self._parent is None else self._parent.snapshot()
        return known | self.state_mapping

    def value_in(self, snapshot: Mapping[int, Any], variable: keras.Variable) -> Any:
        """The value that a variable had when a snapshot was taken."""
        if id(variable) in snapshot:
            return snapshot[id(variable)]
        if self._parent is not None:
            return self._parent.value_in(snapshot, variable)
        return self._unknown(variable) if self._unknown is not None else None

    def add_update(self, update: tuple[keras.Variable, Array]) -> None:
        """Keep a new value. Keras calls this whenever a variable is assigned."""
        variable, value = update
        self._check(f"The Keras variable {variable.path!r} is assigned")
        self.assigned[id(variable)] = variable
        self.state_mapping[id(variable)] = lax.stop_gradient(value)  # see [Note: assigned values]

    def cell(self, owner: object) -> Tree:
        """The cell of `owner`. Raise if the first tracing did not know it."""
        cell = self._cells.get(id(owner))
        if cell is None and self._parent is not None:
            return self._parent.cell(owner)
        if cell is None:
            raise ValueError(
                "The function uses an infeed, an outfeed or an iterator that it creates again each time it is traced. "
                "Create it outside the function, in the scope of the strategy."
            )
        return cell

    def set_cell(self, owner: object, cell: Tree) -> None:
        """Replace the cell of `owner`."""
        self._check("A feed is used")
        self.touched[id(owner)] = owner
        self._cells[id(owner)] = cell

    def _check(self, what: str) -> None:
        if self._where != traced_program():
            raise RuntimeError(
                f"{what} inside one of JAX's own loops, conditionals or gradients, where the change would be lost. Use "
                "`repeat`, `while_loop` and `cond` of `ipu.loops`, and `ipu.training.gradients`."
            )

    def adopt(self, child: VariableScope) -> None:
        """Take over the changes of a child."""
        for variable in child.assigned.values():
            self.add_update((variable, child.state_mapping[id(variable)]))
        for owner in child.touched.values():
            self.set_cell(owner, child.cell(owner))
