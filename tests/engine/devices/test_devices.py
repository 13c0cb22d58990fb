"""Devices: how many there are, in which order, and that nothing breaks when their number changes under way."""

import itertools
import os
import textwrap
from pathlib import Path
from typing import Any

from openipu.config import DeviceConnectionType, IPUConfig, SelectionOrder, reset_ipu_configuration
from openipu.engine.devices import systems

import jax
import jax.numpy as jnp
import pytest

from configuration import unconfigured  # noqa: F401 - a fixture of this module
from new_process import in_a_new_process

# Numbers of devices, in every order of events


def test_a_fresh_process_gets_as_many_devices_as_it_uses(tmp_path: Path) -> None:
    script = """
        import sys
        ipu.config.IPUConfig().auto_select_ipus = 4
        assert "jax" not in sys.modules, "importing the configuration must not load JAX"
        system = configure(auto_select_ipus=4)
        import jax
        assert len(system.devices) == 4 and system.platform == "cpu"
        assert total(system) == 6
        print(len(jax.devices()))
    """
    assert int(in_a_new_process(script, tmp_path)) == 4


@pytest.mark.slow
def test_one_then_four_then_sixteen_devices_with_plain_keras_before_and_after(tmp_path: Path) -> None:
    script = """
        import jax, jax.numpy as jnp, keras, numpy as np

        x = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
        y = x @ np.ones((5, 2), "float32")

        def model():
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
            made = keras.Sequential([keras.Input((5,)), *layers])
            made.compile("adam", "mse")
            return made

        def fit(made, epoch):
            return made.fit(x, y, 16, epochs=epoch + 1, initial_epoch=epoch, shuffle=False, verbose=0).history

        reference = model()
        expected = [fit(reference, epoch) for epoch in range(4)]
        plain = model()
        assert len(jax.devices()) == 1
        held, key = jnp.arange(3.0), jax.random.key(3)
        before = jax.random.normal(key, (3,))
        double = jax.jit(lambda v: 2 * v)
        double(held)

        histories, generations = [fit(plain, 0)], []
        for epoch, count in enumerate((1, 4, 16), start=1):
            system = configure(auto_select_ipus=count)
            generations.append(system.generation)
            assert len(set(system.devices)) == count
            assert total(system) == count * (count - 1) / 2
            histories.append(fit(plain, epoch))
            np.testing.assert_array_equal(double(held), [0, 2, 4])
            np.testing.assert_array_equal(held + jnp.ones(3), [1, 2, 3])
            np.testing.assert_array_equal(jax.random.normal(key, (3,)), before)
            np.testing.assert_array_equal(jax.device_put(held, system.devices[-1]), held)
        assert generations == [1, 2, 3]
        for got, wanted in zip(histories, expected, strict=True):
            for name in wanted:
                np.testing.assert_allclose(got[name], wanted[name], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(plain.predict(x, verbose=0), reference.predict(x, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(fit(model(), 0)["loss"], expected[0]["loss"], rtol=1e-6)

        assert total(configure(auto_select_ipus=2)) == 1
        print("done")
    """
    assert in_a_new_process(script, tmp_path) == "done\n"


def test_the_users_number_of_cpu_devices_is_a_lower_bound(tmp_path: Path) -> None:
    script = """
        system = configure(select_ipus=[(1, 0), 30])
        from openipu.engine.devices import systems
        import jax
        assert [device.id for device in systems.system(0).devices] == [1, 0]
        assert [device.id for device in systems.system(1).devices] == [30]
        assert total(system) == 1
        print(len(jax.devices()))
    """
    flags = "--xla_force_host_platform_device_count=60"
    assert int(in_a_new_process(script, tmp_path, XLA_FLAGS=flags)) == 60
    # JAX has started: what it has is enough, so it is not started again.
    started = "import jax; held = jax.devices()\n" + textwrap.dedent(script) + "assert jax.devices()[0] is held[0]\n"
    assert int(in_a_new_process(started, tmp_path, JAX_NUM_CPU_DEVICES="31")) == 31


def test_a_default_device_moves_along(tmp_path: Path) -> None:
    script = """
        import jax, jax.numpy as jnp
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_default_device", jax.devices()[1])
        system = configure(auto_select_ipus=4)
        (device,) = jnp.ones(2).devices()
        assert device is system.devices[1]
        print("done")
    """
    assert in_a_new_process(script, tmp_path) == "done\n"


def test_the_simulator_is_virtual_cpu_devices_and_nothing_configured_is_one_device(tmp_path: Path) -> None:
    script = """
        from openipu.engine.devices import systems
        first = systems.system()
        assert (len(first.devices), first.platform, first.generation, first.settings.on_cpu) == (1, "cpu", 0, True)
        print(total(configure(auto_select_ipus=2)))
    """
    assert in_a_new_process(script, tmp_path, TF_POPLAR_FLAGS="--use_ipu_model") == "1.0\n"


# Systems


def configure(**options: Any) -> systems.System:
    config = IPUConfig()
    for name, value in options.items():
        setattr(config, name, value)
    config.configure_ipu_system()
    return systems.system()


def test_without_configuration_there_is_one_default_device() -> None:
    system = systems.system()
    assert system.devices == (jax.devices()[0],)
    assert system.ordinal == 0
    with pytest.raises(ValueError, match=r'"/device:IPU:1" does not exist: the configuration has 1 system,'):
        systems.system(1)
    with pytest.raises(ValueError, match='"/device:IPU:-1" does not exist'):
        systems.system(-1)


def test_a_list_makes_systems_of_their_own() -> None:
    configure(auto_select_ipus=[2, 3])
    first, second = systems.system(0), systems.system(1)
    assert (len(first.devices), len(second.devices)) == (2, 3)
    assert not set(first.devices) & set(second.devices)
    assert second.ordinal == 1
    with pytest.raises(ValueError, match=r"the configuration has 2 systems,"):
        systems.system(2)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (SelectionOrder.AUTO, [0, 1, 2, 3, 4, 5, 6, 7]),
        (SelectionOrder.ZIGZAG, [0, 1, 2, 3, 4, 5, 6, 7]),
        (SelectionOrder.SNAKE, [0, 1, 3, 2, 4, 5, 7, 6]),
        (SelectionOrder.HOOF, [0, 2, 4, 6, 7, 5, 3, 1]),
    ],
)
def test_orders(order: SelectionOrder, expected: list[int]) -> None:
    assert systems.layout(8, order) == expected
    for count in range(1, 10):
        assert sorted(systems.layout(count, order)) == list(range(count))


def test_neighbours_in_order_are_neighbours_on_the_board() -> None:
    def apart(first: int, second: int) -> int:
        return abs(first // 2 - second // 2) + abs(first % 2 - second % 2)

    snake, hoof = systems.layout(16, SelectionOrder.SNAKE), systems.layout(16, SelectionOrder.HOOF)
    assert all(apart(a, b) == 1 for a, b in itertools.pairwise(snake))
    assert all(apart(a, b) == 1 for a, b in itertools.pairwise([*hoof, hoof[0]]))


def test_the_order_is_that_of_the_devices() -> None:
    plain = configure(auto_select_ipus=4).devices
    assert configure(auto_select_ipus=4, selection_order=SelectionOrder.HOOF).devices == tuple(
        plain[i] for i in (0, 2, 3, 1)
    )


def test_too_many_virtual_devices() -> None:
    before = configure(auto_select_ipus=2)
    with pytest.raises(ValueError, match=r"1025 virtual CPU devices are needed\. Ask for 1024 or fewer"):
        configure(auto_select_ipus=1025)
    assert systems.system() is before


def test_a_program_that_calls_python_gets_a_spare_thread_or_an_error(tmp_path: Path) -> None:
    """Without one it would hang."""
    script = """
        import os, sys
        count = max(2, len(os.sched_getaffinity(0)))
        configure(auto_select_ipus=count)
        import jax, keras, numpy as np

        class Host(keras.layers.Layer):
            def call(self, x):
                jax.debug.callback(lambda v: None, x)
                return x

        with ipu.ipu_strategy.IPUStrategy().scope():
            model = keras.Sequential([keras.Input((2,)), Host(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        try:
            model.fit(np.ones((8 * count, 2)), np.ones((8 * count, 1)), batch_size=2, verbose=0)
            print("trained")
        except ValueError as error:
            print(str(error).replace(str(count + 1), "more"))
    """
    assert "JAX_NUM_CPU_DEVICES=more before Python starts" in in_a_new_process(script, tmp_path)
    more = str(max(2, len(os.sched_getaffinity(0))) + 1)
    assert in_a_new_process(script, tmp_path, JAX_NUM_CPU_DEVICES=more) == "trained\n"


def test_feeds_and_live_callbacks_need_no_spare_thread(tmp_path: Path) -> None:
    script = """
        import os
        count = max(2, len(os.sched_getaffinity(0)))
        configure(auto_select_ipus=count)
        import jax, keras, numpy as np
        strategy = ipu.ipu_strategy.IPUStrategy()
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: (np.float32([i]) for i in range(100 * count)))
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def program():
            def body(i, x):
                outfeed.enqueue(ipu.ops.cross_replica_ops.cross_replica_sum(x))
                return i + 1
            return ipu.loops.while_loop(lambda i: i < 100, body, [0], infeed)

        strategy.run(program)
        sums = outfeed.dequeue()[:, 0, 0]
        expected = np.arange(100 * count, dtype="float32").reshape(100, count).sum(1)
        print(np.array_equal(sums, expected))

        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.set_asynchronous_callbacks(True)
        model.compile("sgd", "mse", steps_per_execution=16 * count)
        seen = []
        told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: seen.append(step))
        x = np.ones((32 * count, 2))
        model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[told])
        print(seen == list(range(16 * count)), len(jax.devices()) - count)
    """
    assert in_a_new_process(script, tmp_path).split() == ["True", "True", "0"]


# Reconfiguration


def test_only_a_different_configuration_starts_a_generation() -> None:
    first = configure(auto_select_ipus=1)
    assert configure(auto_select_ipus=[1]) is first
    assert systems.generation() == first.generation
    second = configure(auto_select_ipus=1, allow_recompute=True)
    assert second.settings.allow_recompute
    assert second.generation == first.generation + 1 == systems.generation()
    for _ in range(2):
        reset_ipu_configuration()
        assert systems.generation() == second.generation + 1


def test_running_programs_are_waited_for() -> None:
    configure(auto_select_ipus=1)

    def long(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 300, lambda _, a: jnp.tanh(a @ a), x)

    compiled = jax.jit(long).lower(jnp.ones((256, 256))).compile()
    running = compiled(jnp.ones((256, 256)))
    assert not running.is_ready(), "the program is too short for this test"
    configure(auto_select_ipus=1, allow_recompute=True)
    assert running.is_ready()


@pytest.mark.parametrize("connection", list(DeviceConnectionType))
def test_only_always_attaches_at_once(connection: DeviceConnectionType) -> None:
    config = IPUConfig()
    config.device_connection.type = connection
    config.device_connection.version = "ipu2"
    config.auto_select_ipus = systems.MAX_VIRTUAL_DEVICES + 1
    if connection is DeviceConnectionType.ALWAYS:
        with pytest.raises(ValueError, match="1025 virtual"):
            config.configure_ipu_system()
        return
    config.configure_ipu_system()
    with pytest.raises(ValueError, match="1025 virtual"):
        systems.system()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    assert systems.system().settings.connection is connection


# Compiler options


def run_with(options: tuple[tuple[str, str], ...]) -> float:
    """(3 + 1e10) - 1e10, which is 0 in float32 unless the compiler may reorder it."""
    small, large = jnp.full(64, 3.0), jnp.full(64, 1e10)
    program = jax.jit(lambda a, b: (a + b) - b).lower(small, large)
    return float(program.compile(compiler_options=dict(options))(small, large)[0])


def test_fast_math_reaches_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    assert run_with(configure().compiler_options) == 0
    config = IPUConfig()
    config.optimizations.math.fast = True
    config.configure_ipu_system()
    assert dict(systems.system().compiler_options) == {"xla_cpu_enable_fast_math": "True"}
    assert run_with(systems.system().compiler_options) == 3
    assert "No effect" not in caplog.text
    config.compilation_poplar_options = {"xla_cpu_enable_fast_math": "false"}
    config.configure_ipu_system()
    assert run_with(systems.system().compiler_options) == 0


def test_what_belongs_to_another_platform_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = IPUConfig()
    config.optimizations.maximum_cross_replica_sum_buffer_size = 1000
    config.configure_ipu_system()
    assert systems.system().compiler_options == ()
    assert "optimizations.maximum_cross_replica_sum_buffer_size (it has no meaning on platform cpu)" in caplog.text


@pytest.mark.parametrize("options", [{"xla_nonsense": "1"}, {"xla_cpu_enable_fast_math": "perhaps"}])
def test_xla_sees_its_options_before_anything_is_compiled(options: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=f"XLA does not accept .*{next(iter(options))}.*Correct compilation_poplar_options"
    ):
        configure(compilation_poplar_options=options)
    assert systems.configured() is None
