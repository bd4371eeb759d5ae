"""Join the job, and ask for devices, when the program imports TensorFlow, and not earlier: programs may do without it.

    import autograph_rewrite    a finder stands before all others in sys.meta_path
    import tensorflow           they find it; once it is loaded, join(), and the finder has gone

Between the import and the first operation nothing can come, so this is early enough (`runtime.job.tf_server`).
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
    """If the environment tells of a job or a configuration, prepare for it as soon as TensorFlow is there.

    Which process this is, if it is one of several, is read then. This only asks whether to look, as most programs are
    in no job.
    """
    if not is_told(os.environ):
        return
    if sys.modules.get(TENSORFLOW) is not None:
        _join()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def stay_out() -> None:
    """Take it back: commands and launchers import TensorFlow as well, but only the script that they run trains."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder(MetaPathFinder):
    """Finds TensorFlow as the other finders do, and adds something to how it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where TensorFlow is; of other modules we know nothing."""
        if fullname != TENSORFLOW:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: object) -> None:
        """Let a loader join once it has run the module; it stays the loader that the module knows."""
        run = loader.exec_module  # type: ignore[attr-defined]

        def run_and_join(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:  # an import that failed is tried again, with us
                sys.meta_path.remove(self)
                _join()

        loader.exec_module = run_and_join  # type: ignore[attr-defined]


def _join() -> None:
    from autograph_rewrite.runtime.job.logical_devices import prepare_devices
    from autograph_rewrite.runtime.job.tf_server import join_early

    join_early()
    prepare_devices()
