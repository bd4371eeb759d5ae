"""The digits of `digits.py` in any number of processes: `autograph-rewrite launch -n 2 examples/digits_job.py`.

Every process runs this file, is given all digits, and takes its part of each batch. Alone it trains on one device.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from digits import build, load

import autograph_rewrite as ar

CONFIG = {"devices": ["CPU:0"]}  # what each process has; it learns from its environment how many there are
EPOCHS = max(1, int(os.environ.get("EXAMPLE_STEPS", "160")) // 40)


def main() -> None:
    data = load(1797)
    model = ar.distribute(build(), CONFIG)
    history = model.fit(data.x, data.y, batch_size=64, epochs=EPOCHS, shuffle=False, verbose=0)
    for epoch, loss in enumerate(history.history["loss"], 1):
        print(f"epoch {epoch}  loss {loss:.5f}", flush=True)
    print(f"test accuracy {model.evaluate(data.x_test, data.y_test, verbose=0)[1]:.2%}")
    model.save("model.keras")


if __name__ == "__main__":
    main()
