"""What instances know of each other, and the variables that tell them."""

import re

from openipu.settings.instances import (
    COORDINATOR,
    INSTANCE,
    IPUS_PER_REPLICA,
    LAUNCH_TIMEOUT,
    NUM_INSTANCES,
    NUM_REPLICAS,
    RESTARTS,
    Instance,
    check_division,
    from_environment,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

THREE = {COORDINATOR: "a:1234", NUM_INSTANCES: "2", INSTANCE: "1"}


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_environment_tells_everything(count, replicas_each, devices, data):
    index = data.draw(st.integers(0, count - 1))
    instance = Instance(index, count, count * replicas_each, devices, "[::1]:65535", data.draw(st.integers(1, 999)), 3)
    variables = instance.to_environment()
    assert from_environment({**variables, "HOME": "/"}) == instance
    assert all(isinstance(value, str) for value in variables.values())


def test_no_variables_mean_no_instance():
    assert from_environment({"HOME": "/", INSTANCE: ""}) is None


def test_another_launcher_needs_only_three_variables():
    assert from_environment(THREE) == Instance(1, 2, 2, 1, "a:1234", 300, 0, local_index=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({INSTANCE: ""}, "OPENIPU_COORDINATOR is set, but OPENIPU_INSTANCE is not. Start the script with"),
        ({INSTANCE: "2"}, "OPENIPU_INSTANCE is 2, but OPENIPU_NUM_INSTANCES is 2. Give each process its own number"),
        ({INSTANCE: "-1"}, "OPENIPU_INSTANCE is '-1'. Give a whole number of 0 or more."),
        ({NUM_INSTANCES: "0"}, "OPENIPU_NUM_INSTANCES is '0'. Give a whole number of 1 or more."),
        ({NUM_REPLICAS: "two"}, "OPENIPU_NUM_REPLICAS is 'two'. Give"),
        ({IPUS_PER_REPLICA: "1.5"}, "OPENIPU_IPUS_PER_REPLICA is '1.5'. Give"),
        ({LAUNCH_TIMEOUT: "0"}, "OPENIPU_LAUNCH_TIMEOUT is '0'. Give"),
        ({RESTARTS: "²"}, "OPENIPU_RESTARTS is '²'. Give"),
        ({COORDINATOR: "a"}, "OPENIPU_COORDINATOR is 'a'. Give a host and a port, for example 127.0.0.1:29500."),
        ({COORDINATOR: ":1"}, "OPENIPU_COORDINATOR is ':1'. Give"),
        ({COORDINATOR: "a:65536"}, "OPENIPU_COORDINATOR is 'a:65536'. Give"),
        (
            {NUM_REPLICAS: "3"},
            "OPENIPU_NUM_REPLICAS, OPENIPU_IPUS_PER_REPLICA and OPENIPU_NUM_INSTANCES do not match. 3",
        ),
    ],
)
def test_a_wrong_variable_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_environment({**THREE, **changes})


@pytest.mark.parametrize(
    ("count", "replicas", "devices", "local_replicas", "local_devices"),
    [(1, 1, 1, 1, 1), (2, 4, 1, 2, 2), (2, 4, 3, 2, 6), (4, 2, 2, 1, 1), (4, 1, 8, 1, 2), (3, 3, 2, 1, 2)],
)
def test_what_one_instance_has(count, replicas, devices, local_replicas, local_devices):
    instance = Instance(0, count, replicas, devices, "a:1")
    assert (instance.local_replicas, instance.local_devices) == (local_replicas, local_devices)


@pytest.mark.parametrize(
    ("count", "replicas", "devices", "message"),
    [
        (2, 3, 1, "3 replicas of 1 device cannot be dealt evenly to 2 instances. Use 4 replicas, or 1 or 3 instances."),
        (4, 1, 2, "1 replica of 2 devices cannot be dealt evenly to 4 instances. Use 4 replicas, or 2 instances."),
        # Six devices for two instances, but the second replica would be half in each.
        (
            2,
            3,
            2,
            "3 replicas of 2 devices cannot be dealt evenly to 2 instances. Use 4 replicas, or 1 or 3 instances.",
        ),
        (
            3,
            2,
            3,
            "2 replicas of 3 devices cannot be dealt evenly to 3 instances. Use 3 replicas, or 2 or 6 instances.",
        ),
    ],
)
def test_numbers_that_do_not_match(count, replicas, devices, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_division(count, replicas, devices)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_the_remedy_is_one(count, replicas, devices):
    """The numbers that an error recommends are accepted."""
    try:
        check_division(count, replicas, devices)
    except ValueError as error:
        first, second = str(error).partition(". Use ")[2].split(", or ")
        check_division(count, int(first.split()[0]), devices)
        for other in second.removesuffix(" instances.").split(" or "):
            check_division(int(other), replicas, devices)


def test_an_instance_that_is_not_there():
    with pytest.raises(ValueError, match=r"There is no instance 2 of 2\. Instances have numbers from 0 to 1\."):
        Instance(2, 2, 2, 1, "a:1")
