"""Device names: every spelling of TensorFlow has one canonical form, and nonsense is explained."""

from __future__ import annotations

import pytest

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.types import device_names


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("CPU:0", "/device:CPU:0"),
        ("cpu:1", "/device:CPU:1"),
        ("/cpu:0", "/device:CPU:0"),
        ("/device:GPU:12", "/device:GPU:12"),
        ("device:gpu:3", "/device:GPU:3"),
        ("/job:worker/task:1/GPU:0", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/job:w/replica:2/task:3/device:CPU:4", "/job:w/replica:2/task:3/device:CPU:4"),
        ("/job:localhost/cpu:0", "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("/device:MYCHIP:0", "/device:MYCHIP:0"),
    ],
)
def test_every_spelling_of_a_device_has_one_canonical_name(written: str, canonical: str) -> None:
    assert device_names.canonical(written) == canonical
    assert device_names.canonical(canonical) == canonical


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "write a kind and an index"),
        ("CPU", "'CPU' has no index.*write CPU:0"),
        ("gpu1", "'gpu1' has no index.*write GPU:1"),
        ("CPU:x", "its index 'x' is not a number.*write CPU:0"),
        ("CPU:-1", "its index '-1' is not a number"),
        ("CPU:*", r"its index '\*' is not a number"),
        ("CPU:0:1", "its index '0:1' is not a number"),
        ("CPPU:0", "there is no kind 'CPPU'.*did you mean 'CPU:0'"),
        ("banana:0", "there is no kind 'banana'.*/device:KIND:0"),
        ("0", "'0' is not a device"),
        ("CPU:0/CPU:1", "its part 'CPU:0' is out of place"),
        ("/job:a/job:b/CPU:0", "its part 'job:b' is out of place"),
        ("/job:worker/task:1", "names a process, not a device.*write /job:worker/task:1/device:CPU:0"),
        ("/task:1/CPU:0", "names a task without its job"),
        ("/job:worker/task:x/CPU:0", "its task 'x' is not a number"),
        ("/job:!/CPU:0", "'!' is no name of a job"),
        ("CPU:0 ", "its index '0 ' is not a number"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        device_names.parse(written)


def test_a_device_of_this_process_is_shown_short() -> None:
    assert device_names.short("/device:CPU:1") == "CPU:1"
    assert device_names.short("/job:worker/task:1/CPU:0") == "/job:worker/replica:0/task:1/device:CPU:0"


def test_accelerators_are_what_is_neither_a_processor_nor_another_view_of_a_device() -> None:
    names = ["/device:CPU:0", "/device:XLA_GPU:0", "/device:GPU:1", "/device:TPU_SYSTEM:0", "/device:TPU:0"]
    assert device_names.accelerators(names) == ("/device:GPU:1", "/device:TPU:0")


def test_repeated_names_are_told_once_in_order() -> None:
    assert device_names.repeated(["b", "a", "b", "c", "a", "b"]) == ("b", "a")
