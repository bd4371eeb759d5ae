"""A sample of damaged files; `make damage` reads ten thousand."""

from __future__ import annotations

from tests.damage.formats import FORMATS
from tests.damage.many import BAD, run_many
from tests.damage.mutate import mutated

SAMPLE = 12


def test_damaged_files_of_every_format_are_read_or_refused_in_words() -> None:
    found = list(run_many([(name, seed) for seed in range(SAMPLE) for name in FORMATS]))
    assert len(found) == SAMPLE * len(FORMATS)
    assert not [one for one in found if one["outcome"] in BAD]
    assert {one["outcome"] for one in found} == {"read", "refused"}


def test_equal_seeds_do_equal_damage() -> None:
    data = bytes(range(256)) * 4
    assert mutated(data, 7) == mutated(data, 7) != mutated(data, 8)
