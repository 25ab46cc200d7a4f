"""What a record keeps of the numbers that are put into it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from became_avalanche.results.record import StageRecord, TaskRecord, parse_record
from tests.results.records import made_up

FIELDS = [name for name in StageRecord.model_fields if name != "epochs"]


@given(st.floats(1e-30, 1e30), st.sampled_from(FIELDS))
def test_numbers_of_an_epoch_have_six_digits(value, field):
    (kept,) = getattr(StageRecord(epochs=1, **{field: [value]}), field)
    assert kept == pytest.approx(value, rel=5.1e-6, abs=0)
    assert kept == float(np.format_float_scientific(value, 5, unique=False))


def test_a_record_is_written_as_it_is_read():
    stage = StageRecord(epochs=2, training_loss=[1 / 3, None], learning_rate=[0.1 / 3] * 2, seconds=[2 / 3, 1e-5 / 3])
    record = made_up("gpm", 0, tasks=[TaskRecord(stages=[stage])])
    again = parse_record(record.to_json())
    assert again == record
    assert again.to_json() == record.to_json()
    assert "0.333333, null" in record.to_json()
