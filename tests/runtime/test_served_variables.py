"""What functions hold of variables on servers is counted among all objects of the program, whatever they are."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.runtime.function.served_variables import Held, references


class Hidden:
    """An object that does not tell its class, as numpy's open files and dead proxies do not."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


def test_objects_that_hide_their_class_are_passed_over() -> None:
    there = [Hidden()]
    Held()._look()
    assert not references([there])
