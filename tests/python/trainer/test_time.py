# SPDX-License-Identifier: Apache-2.0
import datetime

import pytest

from lamina.errors import ConfigError
from lamina.trainer import Time, Timestamp, TimeUnit, ensure_time


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("160ep", 160, TimeUnit.EPOCH),
        ("1,000ba", 1000, TimeUnit.BATCH),
        ("5e4sp", 50000, TimeUnit.SAMPLE),
        ("1E9TOK", 10**9, TimeUnit.TOKEN),
        (" 0.1dur ", 0.1, TimeUnit.DURATION),
        ("1h30m", 5400, TimeUnit.SECOND),
        ("90s", 90, TimeUnit.SECOND),
        ("1d2h3m4s", 93784, TimeUnit.SECOND),
        ("7.5sec", 7.5, TimeUnit.SECOND),
    ],
)
def test_strings_are_times_and_back(text, value, unit):
    time = Time.from_timestring(text)
    assert (time.value, time.unit) == (value, unit)
    assert Time.from_timestring(str(time)) == time
    assert type(time.value) is type(value) or unit is TimeUnit.SECOND


@pytest.mark.parametrize("text", ["", "5", "ep", "5 ep", "1.5ep", "-", "1m1h", "3eps", "1ep2ba", "ten"])
def test_other_strings_are_errors(text):
    with pytest.raises(ConfigError, match=r"no time|whole number"):
        Time.from_timestring(text)


def test_an_int_is_epochs_and_other_things_are_no_times():
    assert ensure_time(3) == Time(3, "ep")
    assert ensure_time(3, TimeUnit.BATCH) == "3ba"
    for wrong in (True, None, [1], 1.5):
        with pytest.raises(ConfigError):
            ensure_time(wrong)


def test_times_of_a_unit_are_counted_and_compared():
    time = Time.from_batch(10)
    assert time + 5 == "15ba" and 5 + time == "15ba" and time - "3ba" == Time(7, "ba") and 12 - time == Time(2, "ba")
    assert time * 2 == Time(20, "ba") and time / 4 == Time(2, "ba") and time % 3 == 1
    assert time / "40ba" == Time(0.25, TimeUnit.DURATION)
    assert time * "0.5dur" == Time(5, "ba") and Time(0.5, "dur") * time == "5ba"
    assert time < 11 and time <= "10ba" and time > Time(9, "ba") and time >= 10 and time != "10ep"
    assert len({time, Time(10, "ba"), Time(10, "ep")}) == 2
    for wrong in (lambda: time < "1ep", lambda: time + Time(1, "sp"), lambda: time * "2ba", lambda: time / "1ep"):
        with pytest.raises(ConfigError):
            wrong()


def test_a_timestamp_goes_on_and_keeps_its_state():
    second = datetime.timedelta(seconds=1)
    time = Timestamp().to_next_batch(8, 100, second).to_next_batch(4, 50, second)
    assert (time.epoch, time.batch, time.sample, time.token) == (0, 2, 12, 150)
    assert (time.batch_in_epoch, time.sample_in_epoch, time.token_in_epoch) == (2, 12, 150)
    assert time >= "2ba" and time < Time(13, "sp") and time.get("tok") == "150tok"
    assert time.get(TimeUnit.SECOND) == "2s" and time.batch_wct == second and time.epoch_wct == 2 * second
    after = time.to_next_epoch()
    assert (after.epoch, after.batch, after.batch_in_epoch, after.sample_in_epoch) == (1, 2, 0, 0)
    assert after.total_wct == 2 * second and after.epoch_wct == datetime.timedelta()
    assert Timestamp.of_state(time.state_dict()) == time != after
    assert time.copy(batch=7).batch == "7ba"
    with pytest.raises(ConfigError):
        time.get("dur")


def test_parts_of_a_training_are_not_cut_by_rounding():
    assert Time(100, "ba") * "0.29dur" == "29ba" and Time(30, "ba") * Time(0.1, "dur") == "3ba"
