"""What differs between two records is told in a line that can be read."""

from ropelens.train.record import differences


def test_many_and_long_values_stay_a_line() -> None:
    one = {str(n): "a" * 1000 for n in range(50)}
    told = differences(one, {}, one, between=" and ")
    assert told.endswith("; and 45 more")
    assert len(told) < 500
