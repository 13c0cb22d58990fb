"""Loops and conditionals inside device programs, as part of the one compiled program.

Outside of a program, but inside `strategy.scope()` or `ipu.scopes.ipu_scope`, each call runs as its own program.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

from openipu import _validate as validate
from openipu.engine.program.program_trace import current
from openipu.engine.program.user_program import Operation
from openipu.engine.types import Array, Tree
from openipu.ipu_compiler import run_here
from openipu.ipu_infeed_queue import IPUInfeedQueue

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

__all__ = ["cond", "repeat", "while_loop"]


def repeat(
    n: int | Array,
    body: Callable[..., Any],
    inputs: Tree = None,
    infeed_queue: IPUInfeedQueue | None = None,
    use_while_v1: bool = True,
) -> Any:
    """Run `body` `n` times, and return its values after the last time.

    Keras variables that the body assigns (through an optimizer, a metric, a layer) are carried along.

    >>> def body(total):
    ...     return total * 2
    >>> print(strategy.run(lambda: ipu.loops.repeat(10, body, 1.0)))
    1024.0

    Args:
        n: How many times. A whole number makes the fastest loop; the program may also compute it.
        body: Gets the loop-carried values, then the parts of one element of the infeed queue (as keyword arguments if
            the element is a dict). Returns the new values, of the same shapes and dtypes. Operations such as the result
            of `enqueue` may follow them.
        inputs: The initial loop-carried values: None, one array, or a list of arrays (or trees of arrays).
        infeed_queue: Each iteration takes one element from it.
        use_while_v1: Has no effect: there is only one kind of loop.

    Returns:
        The value, a list if there are several, or an operation if there are none.
    """
    if not validate.flag("use_while_v1", use_while_v1):
        validate.no_effect({"use_while_v1=False": "there is only one kind of loop"})
    trace = current()
    if trace is None:
        return run_here(repeat, (n, body, inputs, infeed_queue))
    validate.instance("infeed_queue", infeed_queue, IPUInfeedQueue, optional=True)
    carry = _carried(inputs)
    _check_call(body, "body", carry, infeed_queue)
    return _result(trace.repeat(_count("n", n), _turn(body, carry, infeed_queue), carry))


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    inputs: Tree = None,
    infeed_queue: IPUInfeedQueue | None = None,
    maximum_iterations: int | None = None,
    use_while_v1: bool = True,
) -> Any:
    """Run `body` while `condition` of the loop-carried values holds, at most `maximum_iterations` times.

    The other arguments and the result are as in `repeat`. Elements of an infeed queue are fetched while the program
    runs, because it is not known beforehand how many it will take.

    >>> print(strategy.run(lambda: ipu.loops.while_loop(lambda n: n < 100, lambda n: n * 3, 1)))
    243
    """
    if not validate.flag("use_while_v1", use_while_v1):
        validate.no_effect({"use_while_v1=False": "there is only one kind of loop"})
    trace = current()
    if trace is None:
        return run_here(while_loop, (condition, body, inputs, infeed_queue, maximum_iterations))
    validate.instance("infeed_queue", infeed_queue, IPUInfeedQueue, optional=True)
    carry = _carried(inputs)
    _check_call(body, "body", carry, infeed_queue)
    _check_call(condition, "condition", carry, None)
    most = None if maximum_iterations is None else _count("maximum_iterations", maximum_iterations)
    turn = _turn(body, carry, infeed_queue)
    return _result(trace.while_loop(lambda values: condition(*values), turn, carry, most))


def cond(
    condition: ArrayLike,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any] | None = None,
    inputs: Tree = None,
) -> Any:
    """Run `true_fn` if the condition holds, else `false_fn`. The function that does not run has no effects.

    >>> def program(a):
    ...     return ipu.loops.cond(a > 0, lambda value: value, lambda value: -value, a)
    >>> print(strategy.run(program, args=(-3.0,)))
    3.0

    Unlike in JAX's own conditionals, the functions may assign Keras variables and enqueue values. They must not take
    elements from an infeed queue, because every iteration of a loop takes the same number of them.

    Args:
        condition: One boolean.
        true_fn: Gets `inputs`, and returns values of the same shapes and dtypes; operations may follow them.
        false_fn: The same. None returns the inputs.
        inputs: None, one array, or a list of arrays (or trees of arrays).

    Returns:
        As in `repeat`.
    """
    trace = current()
    if trace is None:
        return run_here(cond, (jnp.asarray(condition), true_fn, false_fn, inputs))
    condition = jnp.asarray(condition)
    if condition.shape or condition.dtype != bool:
        raise TypeError(f"A condition has shape {condition.shape} and dtype {condition.dtype}. Give one boolean.")
    carry = _carried(inputs)

    def branch(function: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
        _check_call(function, "branch", carry, None)
        return lambda values: _checked(function(*values), carry)

    demanded = dict(trace.demands)
    other = (lambda *values: list(values)) if false_fn is None else false_fn
    result = trace.cond(condition, (branch(true_fn), branch(other)), carry)
    if trace.demands != demanded:
        raise ValueError(
            "A branch of a conditional takes an element from an infeed queue. Take it before the conditional."
        )
    return _result(result)


def _count(name: str, n: int | Array) -> Any:
    if hasattr(n, "__index__") and not isinstance(n, jax.Array):
        return validate.count(name, n, least=0)
    if not isinstance(n, jax.Array) or n.ndim or not jnp.issubdtype(n.dtype, jnp.integer):
        raise TypeError(f"`{name}` is {n!r}. Give a whole number, or an integer that the program computes.")
    return n.astype(jnp.int32)


def _carried(inputs: Tree) -> list[Tree]:
    values = [] if inputs is None else list(inputs) if isinstance(inputs, list | tuple) else [inputs]

    def tensor(value: ArrayLike | keras.Variable) -> Array:
        tensor = jnp.asarray(value.value if isinstance(value, keras.Variable) else value)
        return jax.lax.convert_element_type(tensor, tensor.dtype)

    return [jax.tree.map(tensor, value) for value in values]


def _arguments(infeed_queue: IPUInfeedQueue | None, element: Tree) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments that the body gets from an element."""
    if infeed_queue is None:
        return [], {}
    if isinstance(element, dict) and all(isinstance(name, str) for name in element):
        return [], element
    return list(element) if isinstance(element, tuple | list) else [element], {}


def _check_call(function: Callable[..., Any], what: str, carry: list[Any], infeed: IPUInfeedQueue | None) -> None:
    spec = None if infeed is None else infeed.element_spec
    positional, named = _arguments(infeed, spec)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*carry, *positional, **named)
    except TypeError as error:
        more = f" and {len(positional) + len(named)} from the infeed queue" if infeed is not None else ""
        raise TypeError(
            f"The loop's {what} {getattr(function, '__name__', function)}{signature} cannot be called with "
            f"{validate.counted(len(carry), 'input')}{more}: {error}. It must take these arguments, in this order."
        ) from None


def _turn(
    body: Callable[..., Any], first: list[Any], infeed: IPUInfeedQueue | None
) -> Callable[[list[Any]], list[Any]]:
    def turn(carry: list[Any]) -> list[Any]:
        positional, named = _arguments(infeed, None if infeed is None else infeed._dequeue())
        return _checked(body(*carry, *positional, **named), first)

    return turn


def _checked(result: Tree, first: list[Any]) -> list[Any]:
    """The new loop-carried values, checked to have the shapes and dtypes of the initial ones."""
    # The inputs show whether a list or tuple is one value or several.
    parts = list(result) if isinstance(result, list | tuple) else [] if result is None else [result]
    if len(first) == 1 and isinstance(first[0], list | tuple) and len(parts) != 1:
        parts = [result]
    operations = [isinstance(part, Operation) or part is None for part in parts]
    if any(before and not after for before, after in itertools.pairwise(operations)):
        raise ValueError("A loop's body returned an operation before a value. Return values first, then operations.")
    values = [part for part, operation in zip(parts, operations, strict=True) if not operation]
    if len(values) != len(first):
        raise TypeError(
            f"A loop's body or a branch returned {validate.counted(len(values), 'value')}, but `inputs` has "
            f"{len(first)}. Return one new value for each input."
        )
    return [jax.tree.map(_same_kind, old, new) for old, new in zip(first, values, strict=True)]


def _same_kind(old: Array, new: ArrayLike | keras.Variable) -> Array:
    new = jnp.asarray(new.value if isinstance(new, keras.Variable) else new)
    if new.shape != old.shape or not _fits(old, new):
        raise TypeError(
            f"A loop's body or a branch returned {new.dtype}{list(new.shape)} for a value that went in as {old.dtype}"
            f"{list(old.shape)}. Return the same shape and dtype, or start with such a value (1.0, not 1)."
        )
    return jax.lax.convert_element_type(new, old.dtype)


def _fits(old: Array, new: Array) -> bool:
    """Whether `new` has the dtype of `old`, or comes from a Python number that the dtype of `old` can hold."""
    if not (isinstance(new, jax.Array) and new.weak_type):
        return bool(new.dtype == old.dtype)
    with jax.numpy_dtype_promotion("standard"):  # so that our error is raised for a float in place of an integer
        return bool(jnp.result_type(old, new) == old.dtype)


def _result(values: list[Any]) -> Any:
    if not values:
        return Operation()
    return values[0] if len(values) == 1 else values
