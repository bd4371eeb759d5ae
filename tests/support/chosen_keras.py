"""The Keras that `tf.keras` is: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS says so; with all of its names."""

from __future__ import annotations

import importlib
import os
from typing import Any

keras: Any = importlib.import_module("tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras")
