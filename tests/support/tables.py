"""Tables of schedules for property tests."""

from openipu.engine.schedule.schedules import micro_batch_multiple
from openipu.schedules import GPipe, Grouped, Interleaved, OneFOneB, Sequential

from hypothesis import strategies as st

BUILT_IN = [Grouped(), Interleaved(), Sequential(), GPipe(), OneFOneB()]


def names(value):
    return type(value).__name__


def rows(table):
    """The rows as they print, without heading and names."""
    return [" ".join(line.split()[2:]) for line in str(table).splitlines()[1:]]


@st.composite
def tables(draw, shared=True, training=None):
    """Any table of a built-in schedule."""
    stages = draw(st.integers(2, 6))
    schedule = draw(st.sampled_from(BUILT_IN))
    training = draw(st.booleans()) if training is None else training
    devices = list(range(stages))
    if shared and not (training and isinstance(schedule, Interleaved)):
        devices = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    multiple = micro_batch_multiple(schedule, devices, training)
    return schedule.table(stages, multiple * draw(st.integers(1, max(1, 16 // multiple))), devices, training)
