"""What becomes of each imported name where the script uses it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import libcst as cst

from . import ops
from .arguments import metric_edits, op_edits
from .edits import Edit, Remark
from .exports import exists
from .names import Verdict, moved, new_name
from .reasons import for_a_person, in_model_code
from .regions import Region, Regions
from .script import Function, Imported, Script, Use

_HARMLESS: Final = re.compile(r"tensorflow(?:\.Tensor|\.get_logger|\.__version__|\.data\b.*|\.function)?$")
"""What may stay in model code: types, and what `steps.py` judges."""
_METRICS: Final = {
    "accuracy": ("Accuracy", ("labels", "predictions")),
    "mean_squared_error": ("MeanSquaredError", ("labels", "predictions")),
    "mean": ("Mean", ("values",)),
}


@dataclass(frozen=True, slots=True)
class Findings:
    """Edits and remarks, the modules that the edits need, and the imports whose names are still used."""

    edits: list[Edit] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)
    kept: set[Imported] = field(default_factory=set)

    def __iadd__(self, other: Findings) -> Findings:
        self.edits.extend(other.edits)
        self.remarks.extend(other.remarks)
        self.needed.update(other.needed)
        self.kept.update(other.kept)
        return self


def names_of_modules(script: Script) -> dict[str, str]:
    """By which names the script will know keras and openipu."""
    bound = {imported.bound: moved(imported.binds) for imported in script.imports}
    names = {}
    for module, wish in (("keras", "keras"), ("openipu", "ipu")):
        here = [imported.bound for imported in script.imports if imported.at_top and moved(imported.binds) == module]
        wishes = itertools.chain(here, [wish, module], (module + "_" * count for count in itertools.count(1)))
        names[module] = next(name for name in wishes if name not in script.taken and bound.get(name, module) == module)
    return names


def judge_uses(script: Script, regions: Regions, skipped: set[cst.CSTNode]) -> Findings:
    """Judge all uses except those inside of nodes that go away."""
    total = Findings()
    judge = _Judge(script, regions, names_of_modules(script))
    unclear: dict[Function | None, list[Use]] = {}
    for use in script.uses:
        if skipped.isdisjoint((use.node, *script.above(use.node))):
            total += judge.use(use)
            if judge.is_unclear(use):
                unclear.setdefault(regions.function(use.node), []).append(use)
    total.remarks.extend(judge.unclear_remark(function, uses) for function, uses in unclear.items())
    return total


@dataclass(frozen=True, slots=True)
class _Judge:
    """Judges the uses of one script."""

    script: Script
    regions: Regions
    module_names: Mapping[str, str]

    def use(self, use: Use) -> Findings:
        if not isinstance(use.node, cst.Name | cst.Attribute):  # inside of a string
            return Findings(kept={use.imported})
        region = self.regions.at(use.node)
        here = moved(use.name)
        verdict = new_name(use.name)
        if (op := ops.backend_op(here)) and region is not Region.DATA and verdict is not None and verdict.reason:
            return self.op(use, op)
        if verdict is not None:
            return self.known(use, verdict)
        if use.name.partition(".")[0] != "tensorflow":
            return Findings(kept={use.imported})
        return self.tensorflow(use, region)

    def known(self, use: Use, verdict: Verdict) -> Findings:
        """A name of Keras or of the `ipu` namespace."""
        if verdict.reason:
            reason = f"{self.script.text(use.node)}: {verdict.reason}"
            return Findings(remarks=[Remark(self.script.start(use.node), reason)], kept={use.imported})
        bound = new_name(use.imported.binds)
        if bound is not None and bound.new and verdict.new == bound.new + use.name[len(use.imported.binds) :]:
            return Findings(kept={use.imported})
        return self.replaced(use, verdict.new)

    def replaced(self, use: Use, new: str) -> Findings:
        """Write a new name, through the name of its module, or a text in quotes."""
        module, dot, rest = new.partition(".")
        quoted = new.startswith('"') or new == "None"
        text = self.requoted(use.node, new) if quoted else f"{self.module_names[module]}{dot}{rest}"
        if text == self.script.text(use.node):
            return Findings(needed=set() if quoted else {module})
        edit = Edit(self.script.start(use.node), self.script.end(use.node), text)
        return Findings([edit], needed=set() if quoted else {module})

    def requoted(self, node: cst.CSTNode, text: str) -> str:
        """A text in quotes, in other quotes than those of a formatted string around it."""
        strings = (parent for parent in self.script.above(node) if isinstance(parent, cst.FormattedString))
        return text.replace('"', "'") if any('"' in string.start for string in strings) else text

    def tensorflow(self, use: Use, region: Region) -> Findings:
        """A name of TensorFlow that is not Keras."""
        short, model = use.name.removeprefix("tensorflow."), region is Region.MODEL
        if metric := self.metric(use):
            return metric
        if reason := for_a_person(short):
            return self.left(use, reason)
        if (dtype := ops.dtype(use.name)) and (model or self.is_keras_argument(use.node)):
            return self.replaced(use, f'"{dtype}"')
        op = ops.tensorflow_op(use.name)
        is_value = op is not None and short.startswith("nn.") and not self.is_called(use.node)
        if op is not None and is_value and region is not Region.DATA and exists(f"keras.activations.{op.new}"):
            return self.replaced(use, f"keras.activations.{op.new}")
        if not model or _HARMLESS.match(use.name):
            return Findings(kept={use.imported})
        if short == "newaxis":
            return self.replaced(use, "None")
        if short == "name_scope":
            return self.replaced(use, "keras.name_scope")
        if op is None:
            return self.left(use, in_model_code(short))
        return self.op(use, op)

    def metric(self, use: Use) -> Findings | None:
        """A metric of TensorFlow 1, as model functions give it to an estimator."""
        name, call = use.name.removeprefix("tensorflow.compat.v1.metrics."), self.script.parents[use.node]
        if name not in _METRICS or not (isinstance(call, cst.Call) and call.func is use.node):
            return None
        metric, parameters = _METRICS[name]
        edits = metric_edits(self.script, call, f"{self.module_names['keras']}.metrics.{metric}", parameters)
        return None if edits is None else Findings(edits, needed={"keras"})

    def op(self, use: Use, op: ops.Op) -> Findings:
        """An operation that keras.ops has, perhaps with other arguments."""
        call = self.script.parents[use.node]
        if not (isinstance(call, cst.Call) and call.func is use.node):
            if op.keeps_its_arguments:
                return self.replaced(use, f"keras.ops.{op.new}")
            return self.left(use, f"as a function it differs from keras.ops.{op.new} in its arguments")
        edits = op_edits(self.script, call, op)
        if isinstance(edits, str):
            return self.left(use, f"keras.ops.{op.new} does the same, except for {edits}")
        findings = self.replaced(use, f"keras.ops.{op.new}")
        findings.edits.extend(edits)
        return findings

    def left(self, use: Use, reason: str) -> Findings:
        remark = Remark(self.script.start(use.node), f"{self.script.text(use.node)}: {reason}")
        return Findings(remarks=[remark], kept={use.imported})

    def is_called(self, node: cst.CSTNode) -> bool:
        parent = self.script.parents[node]
        return isinstance(parent, cst.Call) and parent.func is node

    def is_keras_argument(self, node: cst.CSTNode) -> bool:
        """Whether a value is given to a function of Keras, where a dtype may be a string."""
        argument = self.script.parents[node]
        call = self.script.parents.get(argument)
        if not (isinstance(argument, cst.Arg) and isinstance(call, cst.Call)):
            return False
        return moved(self.script.names.get(call.func, "")).startswith("keras.")

    def is_unclear(self, use: Use) -> bool:
        """Whether an operation stays because nothing tells what the function is for."""
        is_op = ops.tensorflow_op(use.name) is not None and self.is_called(use.node)
        return is_op and self.regions.is_unclear(use.node)

    def unclear_remark(self, function: Function | None, uses: list[Use]) -> Remark:
        texts = ", ".join(dict.fromkeys(self.script.text(use.node) for use in uses))
        match function:
            case cst.FunctionDef(name=name):
                what = f"the function {name.value}"
            case _:
                what = "the script" if function is None else "a lambda"
        both = function is not None and self.regions.of[function] is Region.BOTH
        why = "serves both a dataset and a model; make one for each" if both else "may be data or model code"
        return Remark(
            self.script.start(uses[0].node),
            f"{texts}: {what} {why}; with a model's tensors, use the operations of keras.ops",
        )
