"""What all estimators share: training, evaluating, predicting, and reading checkpoints."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from openipu import _validate as validate
from openipu.config import configure_ipu_system
from openipu.engine.core.update_rules import round_up
from openipu.engine.estimator.hooks import CheckpointSaverListener, SessionRunHook
from openipu.engine.estimator.model_trace import arguments
from openipu.engine.estimator.runner import EstimatorRunner, single_examples
from openipu.engine.estimator.saved_state import FOLDER
from openipu.engine.types import Tree
from openipu.ipu_run_config import RunConfig

log = logging.getLogger("openipu")


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """Which weights of another training run to start from.

    >>> _ = estimator.train(input_fn, steps=8)
    >>> weights = ipu.estimator.WarmStartSettings("run", vars_to_warm_start="kernel")
    >>> other = ipu.estimator.IPUEstimator(model_fn, "other", warm_start_from=weights)

    Args:
        ckpt_to_initialize_from: A `model_dir`, or one of its checkpoints.
        vars_to_warm_start: Which weights to take: one or more regular expressions, searched for in their names.
    """

    ckpt_to_initialize_from: str | Path
    vars_to_warm_start: str | Sequence[str] = ".*"

    def __post_init__(self) -> None:
        validate.path("ckpt_to_initialize_from", self.ckpt_to_initialize_from)
        names = self.patterns
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"`vars_to_warm_start` is {self.vars_to_warm_start!r}. Give a regular expression, or a list of them."
            )
        for name in names:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(
                    f"`vars_to_warm_start` has {name!r}, which is not a regular expression: {error}. Escape special "
                    "characters with a backslash."
                ) from None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The regular expressions. A weight is taken if its name matches one of them."""
        given: Any = self.vars_to_warm_start
        return tuple(given) if isinstance(given, list | tuple) else (given,)


class EstimatorBase:
    """An estimator. Subclasses check their arguments and choose the `EstimatorRunner` that builds their programs."""

    def __init__(
        self,
        core: type[EstimatorRunner],
        model_fn: Callable[..., Any],
        model_dir: str | Path | None,
        config: RunConfig | None,
        params: dict[str, Any] | None,
        warm_start_from: WarmStartSettings | str | Path | None,
    ) -> None:
        self.config = validate.instance("config", config, RunConfig, optional=True, error=ValueError) or RunConfig()
        self.params = _checked_params(params)
        self.model_fn = model_fn
        if warm_start_from is not None and not isinstance(warm_start_from, WarmStartSettings):
            warm_start_from = WarmStartSettings(warm_start_from)
        folder = _model_dir(model_dir, self.config)
        self._core = core(model_fn, folder, self.config, self.params, configure_ipu_system, warm_start_from)

    @property
    def model_dir(self) -> str:
        """The folder of the checkpoints and event files."""
        return str(self._core.model_dir)

    # --- running

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Self:
        """Train for `steps` more steps, or until `max_steps` steps have run in total.

        A step is one micro-batch on each replica. Training also ends when the data runs out or a hook asks for it. The
        state is saved at the end, and in between as the `RunConfig` says.

        Args:
            input_fn: Returns the training data.
            hooks: `SessionRunHook`s.
            steps: A multiple of `iterations_per_loop`.
            max_steps: Training stops after the first execution that reaches it.
            saving_listeners: Called before and after each checkpoint is saved.
        """
        steps = validate.count("steps", steps, optional=True)
        max_steps = validate.count("max_steps", max_steps, optional=True)
        if (steps is None) == (max_steps is None):
            raise ValueError(f"`steps` is {steps} and `max_steps` is {max_steps}. Give exactly one of them.")
        self._check_multiple(steps)
        listeners = validate.sequence("saving_listeners", saving_listeners, optional=True)
        for position, listener in enumerate(listeners):
            validate.instance(f"saving_listeners[{position}]", listener, CheckpointSaverListener)
        params = self._params_of("train", input_fn)
        self._core.train(input_fn, params, _hooks(hooks), steps, max_steps, list(listeners))
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | Path | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The loss, the metrics and the global step of a checkpoint, as a dict.

        Args:
            input_fn: Returns the data.
            steps: How many steps to evaluate, a multiple of `iterations_per_loop`. None evaluates all of the data.
            hooks: `SessionRunHook`s.
            checkpoint_path: Which checkpoint to evaluate; None for the newest.
            name: A name for this evaluation, which keeps its event files apart from those of others.
        """
        steps = validate.count("steps", steps, optional=True)
        self._check_multiple(steps)
        params = self._params_of("eval", input_fn)
        checkpoint = validate.path("checkpoint_path", checkpoint_path, optional=True)
        return self._core.evaluate(input_fn, params, steps, _hooks(hooks), checkpoint, name)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: str | Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | Path | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        """Yield the predictions for every example, in the order of the data.

        Args:
            input_fn: Returns the data; labels are ignored.
            predict_keys: Which predictions to yield, if model_fn returns a dict of them.
            hooks: `SessionRunHook`s.
            checkpoint_path: Which checkpoint to use; None for the newest.
            yield_single_examples: If False, yield arrays that hold all examples of an execution.
            num_predictions: Stop after this many examples.
        """
        limit = validate.count("num_predictions", num_predictions, optional=True)
        params = self._params_of("predict", input_fn)
        checkpoint = validate.path("checkpoint_path", checkpoint_path, optional=True)
        blocks = self._core.predict(input_fn, params, _hooks(hooks), checkpoint)
        blocks = (_chosen(block, predict_keys) for block in blocks)
        if validate.flag("yield_single_examples", yield_single_examples):
            return single_examples(blocks, limit)
        if limit is not None:
            raise ValueError(
                "`num_predictions` counts single examples. Set `yield_single_examples=True`, or leave it out."
            )
        return blocks

    # --- checkpoints

    def latest_checkpoint(self) -> str | None:
        """The folder of the newest checkpoint; None if there is none."""
        step = self._core.checkpoints().latest()
        return None if step is None else str(self._core.model_dir / FOLDER / str(step))

    def get_variable_names(self) -> list[str]:
        """The names of the variables in the newest checkpoint."""
        return [*self._variables(), "global_step"]

    def get_variable_value(self, name: str) -> Any:
        """The value of a variable in the newest checkpoint."""
        variables = self._variables()
        if name == "global_step":
            saved = self._core.saved()
            return saved.global_step if saved else 0
        if name not in variables:
            raise ValueError(
                f"There is no variable {name!r}. The variables are {', '.join(self.get_variable_names())}."
            )
        return variables[name]

    def _variables(self) -> dict[str, Any]:
        saved = self._core.saved()
        if saved is None:
            raise ValueError(f"There is no checkpoint in {self.model_dir}. Train first.")
        return saved.variables | saved.optimizer

    # --- not available

    def export_saved_model(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not available: model_fn is a function, not a model that could be exported. The error says what to do."""
        raise NotImplementedError(
            "An estimator cannot export a SavedModel: model_fn is a function, not a Keras model. Build the same layers "
            "as a Keras model, set the weights that `get_variable_value` reads (or train it with `fit`), and call "
            "`model.export`."
        )

    experimental_export_all_saved_models = export_saved_model

    # --- checks

    def _check_multiple(self, steps: int | None) -> None:
        iterations = self._core.iterations
        if steps is not None and steps % iterations:
            raise ValueError(
                f"`steps` ({steps}) must be a multiple of `iterations_per_loop` ({iterations}), the steps of one "
                f"execution. Give {round_up(steps, iterations)}, for example."
            )

    def _params_of(self, kind: str, input_fn: Callable[..., Any]) -> dict[str, Any]:
        """The params of a run."""
        del kind
        validate.function("input_fn", input_fn)
        return self.params


def check_model_fn(model_fn: Callable[..., Any], params: Mapping[str, Any] | None, known: Sequence[str]) -> None:
    """Raise unless model_fn can be called with the arguments that it will get."""
    declared = declared_by(model_fn)
    unknown = [name for name in declared if name not in known]
    if unknown:
        raise ValueError(f"model_fn has the argument {unknown[0]!r}, but it can only have {', '.join(known)}.")
    if params and "params" not in declared:
        raise ValueError("`params` is given, but model_fn has no argument `params`. Add it.")


def declared_by(model_fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments of model_fn. Raise if it is not a function."""
    return arguments(validate.function("model_fn", model_fn, error=ValueError))


def _checked_params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    given = validate.mapping("params", params, optional=True, error=ValueError)
    if "input_fn" in given:
        raise ValueError("`params` has the key 'input_fn', which is reserved. Use another name.")
    return given


def _model_dir(model_dir: str | Path | None, config: RunConfig) -> Path:
    folder = validate.path("model_dir", model_dir, optional=True)
    if folder is not None and config.model_dir is not None and str(folder) != config.model_dir:
        raise ValueError(f"`model_dir` is {str(folder)!r}, but `config` says {config.model_dir!r}. Give one of them.")
    chosen = folder or config.model_dir
    if chosen is None:
        chosen = tempfile.mkdtemp(prefix="openipu-estimator-")
        log.warning("Checkpoints are saved in the temporary folder %s. Give `model_dir` to keep them.", chosen)
    folder = Path(chosen)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`model_dir` is {str(folder)!r}, which is a file. Give a folder.")
    return folder


def _hooks(hooks: Sequence[SessionRunHook] | None) -> list[SessionRunHook]:
    return list(validate.sequence("hooks", hooks, optional=True))


def _chosen(predictions: Tree, keys: str | Sequence[str] | None) -> Tree:
    if keys is None:
        return predictions
    keys = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, dict):
        raise ValueError(
            "`predict_keys` is given, but the predictions of model_fn are not a dict. Leave `predict_keys` out."
        )
    missing = [key for key in keys if key not in predictions]
    if missing:
        raise ValueError(
            f"There is no prediction {missing[0]!r}. The predictions are {', '.join(map(repr, predictions))}."
        )
    return {key: predictions[key] for key in keys}
