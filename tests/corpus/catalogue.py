"""All programs of the corpus, by library."""

from __future__ import annotations

from tests.corpus import (
    gpflow,
    keras_applications,
    keras_generative,
    keras_hub_models,
    keras_loops,
    keras_structured,
    keras_text,
    keras_vision,
    on_tf_keras,
    probability,
    recommenders,
    rl,
    slim,
    sonnet,
    v1_tutorials,
)
from tests.corpus.program import Library, Program

LIBRARIES: tuple[Library, ...] = (
    v1_tutorials.LIBRARY,
    rl.LIBRARY,
    keras_loops.LIBRARY,
    slim.LIBRARY,
    probability.LIBRARY,
    gpflow.LIBRARY,
    sonnet.LIBRARY,
    recommenders.LIBRARY,
    keras_structured.LIBRARY,
    keras_text.LIBRARY,
    keras_hub_models.LIBRARY,
    keras_vision.LIBRARY,
    keras_generative.LIBRARY,
    keras_applications.LIBRARY,
    on_tf_keras.LIBRARY,
)


def programs() -> dict[str, tuple[Library, Program]]:
    """Return library and program by name."""
    found = {program.name: (library, program) for library in LIBRARIES for program in library.programs}
    assert len(found) == sum(len(library.programs) for library in LIBRARIES), "two programs have the same name"
    return found
