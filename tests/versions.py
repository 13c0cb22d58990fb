"""A small but real set of tests with the oldest and the newest supported Keras and JAX: `make test-versions`.

Each combination has an environment of its own in .venvs/, made when it is first needed, and again when pyproject.toml
has changed. What is supported is what `dependencies` in pyproject.toml says. "Newest" is what the package index has for
the newest Python that is found: newer versions of JAX need a newer Python.
`python tests/versions.py oldest newest` runs some of the combinations.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TOOLS = ("pytest", "hypothesis")
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
TESTS = {
    "fit/test_parity.py": ("same_as_plain_keras",),
    "fit/test_replicas.py": (
        "a_learning_rate_divided_by_the_replicas_gives_the_weights_of_one_device",
        "random_layers_in_the_last_incomplete_update",
        "own_train_step_is_reduced_over_replicas",
        "batch_statistics_are_shared_by_a_group",
        "a_saved_model_goes_on_with_its_options",
    ),
    "pipeline/test_pipeline.py": (
        "divided_optimizer_state",
        "one_program_and_one_launch_per_execution",
        "recomputation_keeps_less",
        "a_schedule_of_the_users_own",
        "a_checkpoint_of_stages_goes_on_without_them",
        "a_subclassed_model_is_built_from_the_data",
    ),
    "checkpoint/test_checkpoint.py": ("fit_goes_on_in_the_middle_of_an_epoch", "fit_goes_on_with_replicas"),
    "report/test_report.py": (
        "every_call_is_a_run_and_what_is_inside_another_belongs_to_it",
        "the_plan_of_a_pipeline",
        "memory_and_operations_are_those_of_the_program",
        "the_page_needs_nothing_else",
    ),
    "keras_compat/test_initial_values.py": ("values_are_the_same_and_compile_in_less_time",),
    "keras_compat/test_patches.py": (
        "the_mode_of_layers",
        "a_patch_acts_in_its_thread_alone_and_is_undone",
        "models_in_several_threads_give_what_they_give_one_after_the_other",
    ),
}
"""Tests in tests/engine, by file, without "test_". None needs TensorFlow."""
BOUND = re.compile(r"([\w-]+)>=([\d.]+)$")


def oldest(*names: str) -> list[str]:
    """The oldest supported versions of these dependencies, as constraints; of all dependencies if none is named."""
    bounds = [found.groups() for line in PROJECT["dependencies"] if (found := BOUND.match(line))]
    return [f"{name}=={version}" for name, version in bounds if not names or name in names]


COMBINATIONS = {
    "oldest": oldest(),
    "oldest-keras": oldest("keras"),
    "oldest-jax": oldest("jax"),
    "newest": [],
}
"""What is not as new as it can be."""


def works(python: str) -> bool:
    """Whether this command is a Python: some tools put names into the path that only say what is missing."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0


def python_for(name: str) -> str:
    """The oldest supported Python for the oldest of everything, the newest one for the rest; or this one."""
    order = PYTHONS if name == "oldest" else PYTHONS[::-1]
    return next((f"python{version}" for version in order if works(f"python{version}")), sys.executable)


def environment(name: str) -> Path:
    """The Python of a combination's environment, which is made if it is missing or old."""
    folder = ROOT / ".venvs" / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists() and stamp.stat().st_mtime > (ROOT / "pyproject.toml").stat().st_mtime:
        return python
    print(f"{name}: installing into {folder.relative_to(ROOT)} ...", flush=True)
    subprocess.run([python_for(name), "-m", "venv", "--clear", folder], check=True)
    limits = folder / "constraints.txt"
    limits.write_text("\n".join(COMBINATIONS[name]), encoding="utf-8")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", limits]
    subprocess.run([*install, "--editable", ROOT, *TOOLS], check=True)
    stamp.touch()
    return python


def versions(python: Path) -> str:
    """Which versions an environment has."""
    code = (
        "import platform; from importlib.metadata import version as v; "
        "print(', '.join([f'Python {platform.python_version()}', *(f'{n} {v(n)}' for n in ('keras', 'jax', 'numpy'))]))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main(names: list[str]) -> int:
    """Run the tests in each environment; how many of them fail."""
    results = {}
    for name in names:
        python = environment(name)
        print(f"{name}: {versions(python)}", flush=True)
        tests = [f"tests/engine/{file}::test_{test}" for file, tests in TESTS.items() for test in tests]
        results[name] = subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode
    for name, code in results.items():
        print(f"{name}: {versions(environment(name))}: {'passed' if code == 0 else 'FAILED'}")
    return sum(code != 0 for code in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(COMBINATIONS)))
