"""`IPUStrategy`: models created in its scope train, evaluate and predict in compiled device loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from openipu import _validate as validate
from openipu.engine.devices import group, systems
from openipu.engine.devices.current_system import open_strategies, ordinal_of, within
from openipu.engine.devices.running import check_not_forked
from openipu.engine.fit.session import Session
from openipu.engine.keras_compat.initial_values import quick_initial_values
from openipu.engine.keras_compat.model_classes import extend_new_models
from openipu.engine.program.program_trace import current
from openipu.engine.program.user_program import user_program
from openipu.keras.extensions import extended

import keras

__all__ = ["IPUStrategy", "IPUStrategyV1", "get_strategy", "has_strategy"]


class IPUStrategyV1:
    """Runs the Keras models that are created inside its scope on the configured devices.

    >>> strategy = ipu.ipu_strategy.IPUStrategy()
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse", steps_per_execution=2)
    >>> history = model.fit(x, y, batch_size=8, verbose=0)

    A model created elsewhere is plain Keras, even while a scope is active in another thread.

    Args:
        ipu_device: Which system of the configuration to use: "/device:IPU:N" is entry N of `auto_select_ipus`.
        cpu_device: Where variables are initialised. This is always the host.
        enable_dataset_iterators: Ignored: feeds can read any iterable.
        enable_keras_extensions: If False, models created in the scope stay plain Keras.
    """

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        cpu_device: str = "/device:CPU:0",
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        self.ordinal = ordinal_of(ipu_device)
        ordinal_of(cpu_device, "CPU")
        validate.flag("enable_dataset_iterators", enable_dataset_iterators)
        self._enable_keras_extensions = validate.flag("enable_keras_extensions", enable_keras_extensions)

    @property
    def system(self) -> systems.System:
        """The devices that this strategy uses under the current configuration."""
        return systems.system(self.ordinal)

    @property
    def shared(self) -> bool:
        """Whether all instances train this strategy's models together; see `PopDistStrategy`."""
        return False

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1, as in the original, so that scripts do not divide the loss by the number of replicas."""
        return 1

    @property
    def supports_loss_scaling(self) -> bool:
        """Whether mixed precision with a scaled loss works."""
        return True

    def __enter__(self) -> NoReturn:
        raise TypeError("A strategy is not a context itself. Write `with strategy.scope():`.")

    def __exit__(self, *_: object) -> None: ...

    @contextlib.contextmanager
    def scope(self) -> Iterator[IPUStrategyV1]:
        """Use this strategy for models that are created until the `with` block ends."""
        check_not_forked()
        if group.count() > 1 and not self.shared:
            validate.notice(
                f"IPUStrategy trains in each of the {group.count()} instances separately. Use "
                "ipu.distributed.popdist_strategy.PopDistStrategy to train one model in all of them."
            )
        with within(self), extend_new_models(self._extend, self._adopt), quick_initial_values():
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: None = None,
    ) -> Any:
        """Run `fn(*args, **kwargs)` as one compiled program on all replicas, and return the first replica's result.

        A function is compiled once for arguments of the same shapes. Keras variables that it uses are read and updated.
        Arrays and floats among the arguments are inputs of the program, the same on every replica, and elements come
        from any iterator with the same `element_spec`; whole numbers, models, queues and everything else become part of
        the program. If the program uses an outfeed queue, this returns when the program has ended.

        >>> print(strategy.run(lambda a: a * 2, args=(np.arange(3, dtype="float32"),)))
        [0. 2. 4.]

        Args:
            fn: A function of JAX or `keras.ops` operations. Create layers, models and optimizers outside of it.
            args: Its positional arguments, as a tuple or list.
            kwargs: Its keyword arguments.
            options: Must be None.
        """
        if options is not None:
            raise ValueError("`run` has no `options` here. Leave them out.")
        validate.function("fn", fn)
        args, kwargs = validate.sequence("args", args), validate.mapping("kwargs", kwargs, optional=True)
        if current() is not None:
            return fn(*args, **kwargs)
        with within(self):
            return user_program(fn, self.ordinal)(args, kwargs)

    def experimental_run_v2(self, *_args: Any, **_kwargs: Any) -> Any:
        """Not available; the old name of `run`."""
        raise RuntimeError("`experimental_run_v2` is the old name of `run`. Call `strategy.run(fn, args=...)`.")

    def _extend(self, cls: type) -> type | None:
        """The class of a new model, if it is made in this scope and not in one inside it."""
        return extended(cls) if self._enable_keras_extensions and get_strategy() is self else None

    def _adopt(self, model: keras.Model) -> None:
        """Make a new model one of this strategy."""
        model.__dict__["_ipu_session"] = Session(model, self)


IPUStrategy = IPUStrategyV1


def has_strategy() -> bool:
    """Whether a strategy's scope is active in this thread.

    >>> with strategy.scope():
    ...     print(ipu.ipu_strategy.has_strategy())
    True
    >>> ipu.ipu_strategy.has_strategy()
    False
    """
    return bool(open_strategies())


def get_strategy() -> IPUStrategyV1:
    """The strategy whose scope is active in this thread.

    >>> with strategy.scope():
    ...     print(ipu.ipu_strategy.get_strategy() is strategy)
    True
    """
    if not open_strategies():
        raise RuntimeError("No strategy's scope is active here. Enter one with `with strategy.scope():`.")
    strategy: IPUStrategyV1 = open_strategies()[-1]
    return strategy
