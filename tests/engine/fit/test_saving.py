"""Models of a strategy are saved and loaded as Keras' own, in both directions, with everything that training needs."""

import copy
import json
import pickle
import zipfile

from openipu.keras.extensions import ModelExtension

import keras
import numpy as np
import pytest
from keras import layers

import zoo

pytestmark = zoo.KERAS_WARNINGS

X, Y = zoo.numbers(27)


@keras.saving.register_keras_serializable("saving_tests")
class Registered(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first, self.last = layers.Dense(units, "tanh"), layers.Dense(1)

    def call(self, inputs):
        return self.last(self.first(inputs))

    def get_config(self):
        return super().get_config() | {"units": self.units}


def sequential():
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])


def functional():
    x = layers.BatchNormalization()(layers.Dense(4)(inputs := keras.Input((6,))))
    return keras.Model(inputs, layers.Dense(1)(x))


MAKERS = {"sequential": sequential, "functional": functional, "registered subclass": Registered}
SIDES = {"scope": True, "plain": False}


def trained(make, inside):
    keras.utils.set_random_seed(5)
    with zoo.scope_if(inside):
        model = make()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=3)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


def load(path, inside):
    with zoo.scope_if(inside):
        return keras.models.load_model(path)


@pytest.mark.parametrize(("of", "to"), [("scope", "scope"), ("scope", "plain"), ("plain", "scope")])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_keras_files_open_on_both_sides_and_training_goes_on(tmp_path, make, of, to):
    model = trained(make, SIDES[of])
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras", SIDES[to])
    assert isinstance(loaded, ModelExtension) == SIDES[to]
    assert type(loaded).__name__ == type(model).__name__
    assert loaded.steps_per_execution == 3
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(loaded.evaluate(X, Y, verbose=0), model.evaluate(X, Y, verbose=0), rtol=1e-5)
    more = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    expected, actual = model.fit(X, Y, **more).history, loaded.fit(X, Y, **more).history
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_saved_file_does_not_know_the_strategy(tmp_path, make):
    configs = []
    for inside in (True, False):
        path = tmp_path / f"{inside}.keras"
        trained(make, inside).save(path)
        with zipfile.ZipFile(path) as file:
            config = json.loads(file.read("config.json"))
        assert "openipu" not in json.dumps(config)
        configs.append((config["module"], config["class_name"], config.get("registered_name"), sorted(config)))
    assert configs[0] == configs[1]


def test_steps_per_execution_is_kept_in_the_compile_config():
    model = trained(sequential, True)
    assert model.get_compile_config()["steps_per_execution"] == 3
    with zoo.scope_if(True):
        copy = sequential()
    copy.compile_from_config(model.get_compile_config())
    assert copy.steps_per_execution == 3
    copy.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize("to", SIDES)
@pytest.mark.parametrize("make", [sequential, functional])
def test_json(make, to):
    model = trained(make, True)
    with zoo.scope_if(SIDES[to]):
        copy = keras.models.model_from_json(model.to_json())
    assert isinstance(copy, ModelExtension) == SIDES[to]
    copy.set_weights(model.get_weights())
    np.testing.assert_allclose(copy.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("to", SIDES)
def test_weights_files(tmp_path, to):
    model = trained(functional, True)
    model.save_weights(tmp_path / "model.weights.h5")
    with zoo.scope_if(SIDES[to]):
        copy = functional()
    copy.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(copy.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)


def test_saving_between_two_fits_changes_nothing(tmp_path):
    saved, not_saved = trained(sequential, True), trained(sequential, True)
    saved.save(tmp_path / "model.keras")
    for model in (saved, not_saved):
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(saved.get_weights(), not_saved.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_export_and_summary_work(tmp_path, capsys):
    model = trained(functional, True)
    model.summary()
    assert "functional" in capsys.readouterr().out
    config = keras.saving.serialize_keras_object(model)
    assert config["class_name"] == "Functional"
    assert keras.saving.get_registered_name(type(trained(Registered, True))) == "saving_tests>Registered"
    model.save(tmp_path / "model.h5")
    loaded = keras.models.load_model(tmp_path / "model.h5", compile=False)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("to", SIDES)
def test_copies_belong_to_the_scope_they_are_made_in(to):
    model = trained(functional, True)
    with zoo.scope_if(SIDES[to]):
        others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), keras.models.clone_model(model)]
    others[2].set_weights(model.get_weights())
    for other in others:
        assert isinstance(other, ModelExtension) == SIDES[to]
        np.testing.assert_allclose(other.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)
    others[0].fit(X, Y, batch_size=8, verbose=0)
