"""Join the job, and ask for devices, when the program imports TensorFlow: not earlier, as it may never import it.

    import autograph_rewrite    a finder stands before all others in sys.meta_path
    import tensorflow           they find it; once it is loaded, join(), and the finder has gone

The import comes before the first operation, so this is early enough (`runtime.job.tf_server`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from autograph_rewrite.cluster.launchers import is_told

TENSORFLOW = "tensorflow"


def join_on_import() -> None:
    """If the environment names a job or a configuration, prepare for it as soon as TensorFlow is imported.

    The membership of this process is read only then: most programs are in no job.
    """
    if not is_told(os.environ):
        return
    if sys.modules.get(TENSORFLOW) is not None:
        _join()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def stay_out() -> None:
    """Undo `join_on_import`: commands and launchers import TensorFlow, but only the script that they run trains."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder(MetaPathFinder):
    """Finds TensorFlow by the other finders, and lets its loader join the job."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of TensorFlow; None for other modules."""
        if fullname != TENSORFLOW:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: object) -> None:
        """Let a loader join once it has run the module; the same object stays the loader of the module."""
        run = loader.exec_module  # type: ignore[attr-defined]

        def run_and_join(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:  # removed only after success: an import that failed may be tried again
                sys.meta_path.remove(self)
                _join()

        loader.exec_module = run_and_join  # type: ignore[attr-defined]


def _join() -> None:
    from autograph_rewrite.runtime.job.logical_devices import prepare_devices
    from autograph_rewrite.runtime.job.tf_server import join_early

    join_early()
    prepare_devices()
