"""The public names, each as a directive by which mkdocstrings puts its signature and docstring on the page."""

from __future__ import annotations

import autograph_rewrite

HEAD = """\
# API

`import autograph_rewrite as ar`: the public names. Importing the package does not import TensorFlow; the first use of
a name that needs it does.

"""
_ERRORS = f"{autograph_rewrite.__name__}.errors"


def api_page() -> str:
    """Return the page of the public names: functions, then classes, then errors."""
    names = sorted(autograph_rewrite.__all__, key=lambda name: (name.endswith("Error"), name[0].isupper(), name))
    return HEAD + "\n".join(f"::: {_where(name)}.{name}\n" for name in names)


def _where(name: str) -> str:
    """Return the module that a public name is loaded from."""
    module = autograph_rewrite._LAZY.get(name)
    return _ERRORS if module is None else f"{autograph_rewrite.__name__}.{module}"
