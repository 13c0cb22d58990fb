"""The command line of `openipu launch`, and which options of poprun it takes."""

import subprocess
import sys

from openipu.cli import app
from openipu.cli.launch import Options, make_job
from openipu.cli.poprun import WITHOUT_EFFECT, split

import pytest
from typer.testing import CliRunner

VALUES = ("--num-instances", "--host")


@pytest.mark.parametrize(
    ("words", "options", "command", "without_effect"),
    [
        ("train.py", "", "train.py", ""),
        ("--num-instances 2 train.py --num-instances 3", "--num-instances 2", "train.py --num-instances 3", ""),
        ("--num-instances=2 train.py", "--num-instances=2", "train.py", ""),
        ("--host a -m package.train -m x", "--host a", "-m package.train -m x", ""),
        ("--host a -- ./--odd.py -- x", "--host a", "./--odd.py -- x", ""),
        ("-vv --numa-aware=yes train.py yes", "", "train.py yes", "-vv --numa-aware"),
        ("--update-partition yes --reset-partition train.py", "", "train.py", "--update-partition --reset-partition"),
        ("--vipu-partition p --host a python train.py", "--host a", "python train.py", "--vipu-partition"),
        ("--vipu-partition=p -m x", "", "-m x", "--vipu-partition"),
        ("--unknown --num-instances 2 train.py", "--unknown --num-instances 2", "train.py", ""),
        ("--num-instances", "--num-instances", "", ""),
        ("--vipu-partition", "", "", "--vipu-partition"),
    ],
)
def test_where_the_options_end(words, options, command, without_effect):
    found = split(words.split(), VALUES)
    assert " ".join(found.options) == options
    assert " ".join(found.command) == command
    assert " ".join(found.without_effect) == without_effect


def test_a_value_that_looks_like_options():
    words = ["--mpi-global-args", "--tag-output -x A", "--mpi-local-args=-x B", "train.py"]
    found = split(words, VALUES)
    assert (found.options, found.command) == ((), ("train.py",))
    assert list(found.without_effect) == ["--mpi-global-args", "--mpi-local-args"]


def test_every_option_of_poprun_without_effect_has_a_reason():
    words = [word for name in WITHOUT_EFFECT for word in (name, "1")]
    found = split([*words, "train.py"], VALUES)
    assert (found.options, found.command) == ((), ("train.py",))
    assert set(found.without_effect) == set(WITHOUT_EFFECT)
    assert all(found.without_effect.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-instances 0 true", "--num-instances"),
        ("--num-instances 2 --num-replicas 3 true", "3 replicas of 1 device cannot be dealt evenly to 2 instances."),
        ("--host a,b --num-instances 1 true", "There are 2 hosts for 1 instances. Use 2 instances or more, or fewer"),
        ("--host a,,b true", "'' is not the name of a host."),
        ("--host=-oProxyCommand=x true", "'-oProxyCommand=x' is not the name of a host."),
        ("--num-instances 2 --only-output-from-instance 2 true", "There is no instance 2 to show the output of."),
        ("no/such/train.py", "There is no file no/such/train.py."),
        ("no-such-command", "no-such-command is neither a .py file nor a command that can be run."),
        ("-m", "-m is not followed by the name of a module."),
        ("--num-instances 2", "Missing argument"),
        ("--num-instance 2 true", "No such option: --num-instance"),
    ],
)
def test_mistakes_are_found_before_anything_starts(words, message):
    result = CliRunner().invoke(app, ["launch", *words.split()], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_cache_path_with_a_space():
    result = CliRunner().invoke(app, ["launch", "--executable-cache-path", "a b", "true"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'a b' cannot be the folder of compiled programs" in result.output


def options(*command, **changes):
    given = {"num_instances": None, "num_replicas": None, "ipus_per_replica": 1, "host": None, "max_restarts": 0}
    given |= {"only_output_from_instance": None, "executable_cache_path": None, "timeout": 300, **changes}
    return Options(command, **given)


def test_what_is_not_given_follows_from_the_rest():
    alone = make_job(options("true"))
    assert (alone.instances, alone.replicas) == (1, 1)
    hosts = make_job(options("train.py", host="a, b"))
    assert (hosts.instances, hosts.replicas, hosts.hosts) == (2, 2, ("a", "b"))
    some = make_job(options("true", num_instances=4))
    assert (some.instances, some.replicas) == (4, 4)


def test_instances_are_dealt_to_hosts_in_blocks():
    five = make_job(options("x", host="a,b", num_instances=5))
    assert [five.host(index) for index in range(5)] == ["a", "a", "a", "b", "b"]
    six = make_job(options("x", host="a,b,c", num_instances=6))
    assert [six.host(index) for index in range(6)] == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--executable_cache_path=new"),
        ("--use_ipu_model --executable_cache_path=old", "--use_ipu_model --executable_cache_path=new"),
    ],
)
def test_the_cache_path_joins_the_flags(monkeypatch, before, after):
    monkeypatch.setenv("TF_POPLAR_FLAGS", before)
    job = make_job(options("true", executable_cache_path="new"))
    assert job.environment == {"TF_POPLAR_FLAGS": after}


def test_the_launcher_needs_neither_keras_nor_jax():
    heavy = ("keras", "jax", "numpy", "tensorflow")
    code = f"import sys, openipu.cli.launch; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
