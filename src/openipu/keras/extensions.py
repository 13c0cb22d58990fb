"""The methods that replace or extend Keras' own in models created inside a strategy's scope.

They are thin: they check their arguments and pass each call to the engine, together with the model's `Session`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

from openipu import _validate as validate
from openipu._unavailable import Unavailable
from openipu.engine.core.accumulation import Accumulation, Reduction, check_divided, dtype_option
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.options import MetricReduction, Options
from openipu.engine.core.state import Mode
from openipu.engine.core.updates import Updates
from openipu.engine.devices import group
from openipu.engine.fit import fit as run
from openipu.engine.fit.session import Session
from openipu.engine.fit.step_function import StepFunction
from openipu.engine.interrupts import interruptible, uninterrupted
from openipu.engine.keras_compat.model_classes import pickled, subclass_as
from openipu.ipu_infeed_queue import prefetch_option

import keras

from .pipelining import PipeliningExtension, saved_stages

OPTIONS_FILE = "openipu.json"
_SHARDING, _OFFLOADING = "replicated_optimizer_state_sharding", "offload_weight_update_variables"
_ACCUMULATION = (
    "gradient_accumulation_steps_per_replica", "gradient_accumulation_reduction_method", "dtype", _SHARDING,
    _OFFLOADING, "name", "use_v2_gradient_accumulation_optimizer",
)  # fmt: skip


class ModelExtension(PipeliningExtension):
    """Trains, evaluates and predicts in compiled device loops."""

    _ipu_session: Session

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train the model. Each launch of the compiled program runs `steps_per_execution` steps.

        >>> history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        >>> len(history.history["loss"])
        3
        """
        return self._ipu_run("train", run.fit, super().fit, args, kwargs)  # type: ignore[misc]

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Compute losses and metrics over the data.

        >>> loss = model.evaluate(x, y, batch_size=8, verbose=0)
        """
        return self._ipu_run("test", run.evaluate, super().evaluate, args, kwargs)  # type: ignore[misc]

    @functools.wraps(keras.Model.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs for every row of the data, in order.

        >>> model.predict(x, batch_size=8, verbose=0).shape
        (32, 1)
        """
        return self._ipu_run("predict", run.predict, super().predict, args, kwargs)  # type: ignore[misc]

    @functools.wraps(keras.Model.train_on_batch)
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a single batch.

        >>> logs = model.train_on_batch(x[:8], y[:8], return_dict=True)
        """
        return self._ipu_on_batch("train_on_batch", *args, **kwargs)

    @functools.wraps(keras.Model.test_on_batch)
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Compute losses and metrics over a single batch.

        >>> logs = model.test_on_batch(x[:8], y[:8], return_dict=True)
        """
        return self._ipu_on_batch("test_on_batch", *args, **kwargs)

    @functools.wraps(keras.Model.predict_on_batch)
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs for a single batch.

        >>> model.predict_on_batch(x[:8]).shape
        (8, 1)
        """
        return self._ipu_on_batch("predict_on_batch", *args, **kwargs)

    def _ipu_run(
        self,
        mode: Mode,
        ours: Callable[..., Any],
        of_keras: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        session = self._ipu_session
        with session.using(ours.__name__):
            if session.left_to_keras(mode):
                with interruptible():
                    return of_keras(*args, **kwargs)
            return ours(session, *args, **kwargs)

    def _ipu_on_batch(self, call: str, *args: Any, **kwargs: Any) -> Any:
        # Keras takes the state from the variables and puts it back. Ctrl-C in between would lose it.
        with self._ipu_session.using(call), uninterrupted():
            return getattr(super(), call)(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """Prepare the program behind `fit` and `train_on_batch`."""
        return self._ipu_make_function("train", super().make_train_function, force)  # type: ignore[misc]

    def make_test_function(self, force: bool = False) -> Any:
        """Prepare the program behind `evaluate` and `test_on_batch`."""
        return self._ipu_make_function("test", super().make_test_function, force)  # type: ignore[misc]

    def make_predict_function(self, force: bool = False) -> Any:
        """Prepare the program behind `predict` and `predict_on_batch`."""
        return self._ipu_make_function("predict", super().make_predict_function, force)  # type: ignore[misc]

    def _ipu_make_function(self, mode: Mode, of_keras: Callable[[bool], Any], force: bool) -> Any:
        session = self._ipu_session
        if session.left_to_keras(mode):
            return of_keras(force or isinstance(getattr(self, f"{mode}_function"), StepFunction))
        return session.function(mode, force)

    def jax_state_sync(self) -> None:
        """Copy the state of a running execution into the model's variables. Keras' callbacks call this."""
        self._ipu_session.sync()
        super().jax_state_sync()  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Pickle as a plain Keras model. Like a loaded model, it then belongs to the scope in which it is unpickled."""
        return pickled(super().__reduce__())

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        gradient_accumulation_reduction_method: Reduction | str = Reduction.SUM,
        use_v2_gradient_accumulation_optimizer: bool = False,
        **gradient_accumulation_optimizer_kwargs: Any,
    ) -> None:
        """Accumulate the gradients of several micro-batches before each update of the weights.

        For a pipelined model, use `set_pipelining_options` instead.

        >>> model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
        >>> history = model.fit(x, y, batch_size=8, verbose=0)  # an update has 2 micro-batches on each of 2 replicas

        Args:
            gradient_accumulation_steps_per_replica: Micro-batches per update; None keeps the previous value. Each of
                the other options gets its default if it is left out.
            gradient_accumulation_reduction_method: "sum" (the default: the learning rate acts on the sum of the
                gradients), "mean" or "running_mean".
            use_v2_gradient_accumulation_optimizer: Has no effect: there is only one implementation.
            **gradient_accumulation_optimizer_kwargs: `dtype` to accumulate in (or a function that returns it for a
                variable), `replicated_optimizer_state_sharding`, `offload_weight_update_variables`, and `name`, which
                is ignored.
        """
        extra = dict(gradient_accumulation_optimizer_kwargs)
        for key in ("opt", "num_mini_batches", "experimental_normalize_gradients"):
            if key in extra:
                raise ValueError(
                    f"`{key}` is set by the model itself. Use `gradient_accumulation_steps_per_replica` and "
                    "`gradient_accumulation_reduction_method`, and pass the optimizer to `compile`."
                )
        if validate.flag("use_v2_gradient_accumulation_optimizer", use_v2_gradient_accumulation_optimizer):
            validate.no_effect({"use_v2_gradient_accumulation_optimizer": "there is only one implementation"})
        validate.options(extra, _ACCUMULATION)
        old = self._ipu_session.options
        count = validate.count(
            "gradient_accumulation_steps_per_replica", gradient_accumulation_steps_per_replica, optional=True
        )
        method = validate.member(
            "gradient_accumulation_reduction_method", gradient_accumulation_reduction_method, Reduction
        )
        shard = validate.flag(_SHARDING, extra.get(_SHARDING, False))
        offload = validate.flag(_OFFLOADING, extra.get(_OFFLOADING), optional=True)
        check_divided(shard, offload)
        accumulation = Accumulation(count or old.unpipelined.steps, method, dtype_option(extra.get("dtype")))
        self._set_ipu_options(unpipelined=Updates(accumulation, shard, offload))

    def set_replication_options(self, replicated_metric_reduction_method: MetricReduction | str = "NONE") -> None:
        """Choose how metrics of replicas are reported: the true value (NONE), or a LIST, SUM or MEAN of the values.

        >>> model.set_replication_options("LIST")
        >>> len(model.evaluate(x, y, batch_size=8, verbose=0))  # the loss of each replica
        2
        """
        method = validate.member(
            "replicated_metric_reduction_method", replicated_metric_reduction_method, MetricReduction
        )
        self._set_ipu_options(metric_reduction=method)

    def set_label_check(self, enabled: bool = True) -> None:
        """Choose whether `fit` and `evaluate` compare integer labels with the number of classes before they run.

        Only labels in NumPy arrays are checked, and only for Keras' sparse categorical crossentropy. Labels that the
        loss ignores (`ignore_class`) or that have a sample weight of 0 may have any value.

        >>> model.set_label_check(False)
        """
        self._set_ipu_options(check_labels=validate.flag("enabled", enabled))

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Choose whether batch callbacks are called for every step, while the execution runs, or once per execution.

        If True, a callback gets the logs after each step, as if `steps_per_execution` were 1, in order and in the
        thread that called `fit`. The program only waits when callbacks are more than `buffer_depth` steps behind.
        Weights are available between executions: a callback that uses `self.model` waits for the end of the execution.

        >>> model.set_asynchronous_callbacks(True)
        >>> seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print(batch))
        >>> history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[seen])
        0
        1
        2
        3
        """
        self._set_ipu_options(live_callbacks=validate.flag("asynchronous", asynchronous))

    def set_infeed_queue_options(self, **kwargs: Any) -> None:
        """Set how far data is read ahead: `prefetch_depth` is the number of batches (over all replicas) kept ready.

        The batches of at least one execution are always kept ready. `optimise_latency` has no effect.

        >>> model.set_infeed_queue_options(prefetch_depth=16)
        """
        _check_feed_options(kwargs, "prefetch_depth", _INFEED_OWN)
        depth = prefetch_option(kwargs["prefetch_depth"]) if "prefetch_depth" in kwargs else None
        self._set_ipu_options(prefetch_depth=depth)

    def set_outfeed_queue_options(self, **kwargs: Any) -> None:
        """Set how results leave the program: `buffer_depth` is the number of steps whose logs can wait for callbacks.

        It matters only for asynchronous callbacks. `optimise_latency` has no effect.

        >>> model.set_outfeed_queue_options(buffer_depth=100)
        """
        _check_feed_options(kwargs, "buffer_depth", _OUTFEED_OWN)
        depth = validate.count("buffer_depth", kwargs["buffer_depth"]) if "buffer_depth" in kwargs else None
        self._set_ipu_options(buffer_depth=depth)

    @functools.wraps(keras.Model.save)
    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the model. Of instances that train it together, the first one writes the file.

        >>> model.save("model.keras")
        >>> keras.saving.load_model("model.keras").output_shape
        (None, 1)
        """
        self._ipu_save(super().save, *args, **kwargs)  # type: ignore[misc]

    @functools.wraps(keras.Model.save_weights)
    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Save the weights. Of instances that train them together, the first one writes the file.

        >>> model.save_weights("model.weights.h5")
        >>> model.load_weights("model.weights.h5")
        """
        self._ipu_save(super().save_weights, *args, **kwargs)  # type: ignore[misc]

    @functools.wraps(keras.Model.export)
    def export(self, *args: Any, **kwargs: Any) -> None:
        """Export the model. Of instances that train it together, the first one writes the files."""
        self._ipu_save(super().export, *args, **kwargs)  # type: ignore[misc]

    def _ipu_save(self, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._ipu_session.sync()  # instances may have to do this together
        if group.index() == 0 or not self._ipu_session.strategy.shared:
            write(*args, **kwargs)

    def save_assets(self, dir_path: str) -> None:
        """Write the options next to the weights. Plain Keras ignores them and reads the rest of the file."""
        options = self._ipu_session.options
        weights = variables_of(self, "predict").trainable
        options = dataclasses.replace(options, stages=saved_stages(self, options.stages)).of_weights(weights)
        pathlib.Path(dir_path, OPTIONS_FILE).write_text(options.to_json())

    def export_for_ipu_serving(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raise an error that says what to do: nothing is exported for IPUs."""
        raise Unavailable("keras.Model.export_for_ipu_serving").error()

    def load_assets(self, dir_path: str) -> None:
        """Read what `save_assets` wrote. A model that plain Keras saved has no such file."""
        path = pathlib.Path(dir_path, OPTIONS_FILE)
        if path.exists():
            self._ipu_session.set_options(Options.from_json(path.read_text()))


_INFEED_OWN = ("dataset", "infeed_spec", "element_spec", "_internal_id", "device_ordinal")
_OUTFEED_OWN = ("outfeed_mode", "device_ordinal")


def _check_feed_options(options: dict[str, Any], name: str, own: tuple[str, ...]) -> None:
    """Raise for options that the model sets itself, and for unknown ones."""
    for key in own:
        if key in options:
            raise ValueError(f"`{key}` is set by the model itself. Give only `{name}`.")
    validate.options(options, (name, "optimise_latency"))
    if validate.flag("optimise_latency", options.get("optimise_latency", False)):
        validate.no_effect({"optimise_latency of a model's feeds": "batches and logs are never held back"})


@functools.cache
def extended(cls: type) -> type:
    """`cls` with the methods above, or `cls` itself if it has them already."""
    return cls if issubclass(cls, ModelExtension) else subclass_as(cls, ModelExtension)
