"""What differs between two records is told in a line that can be read."""

from ropelens.train.record import differences


def test_of_objects_the_values_inside_that_differ() -> None:
    one = {"steps": 3, "text": {"a.txt": "0" * 64, "b.txt": "1" * 64}, "kept": {"x": 1}}
    other = {"steps": 3, "text": {"a.txt": "2" * 64, "b.txt": "1" * 64}, "kept": {}}
    told = differences(one, other, one, between=", now ")
    assert told == "text.a.txt: 00000000, now 22222222; kept.x: 1, now nothing"


def test_many_and_long_values_stay_a_line() -> None:
    one = {str(n): "a" * 1000 for n in range(50)}
    told = differences(one, {}, one, between=" and ")
    assert told.endswith("; and 45 more")
    assert len(told) < 500
