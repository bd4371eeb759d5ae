"""`make demo`: a CNN learns handwritten digits on one device, then the same model does over two replicas.

Same initial weights, same order of examples: the two curves coincide but for rounding. Batch norm uses the statistics
of the whole batch and dropout draws one mask for it, in both cases; nothing in the model knows of replicas.

    python examples/digits.py --epochs 12 --replicas 2 --variables shared
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

import autograph_rewrite as ar

WANTED_ACCURACY = 0.97
CURVE = 20  # characters
console = Console(width=None if sys.stdout.isatty() else 120)


class Data(NamedTuple):
    """Images in [0, 1] and their digits."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any


class Run(NamedTuple):
    """One training run: Keras' history and the seconds that it took, the first epoch (which traces) apart."""

    history: dict[str, list[float]]
    first: float
    rest: float


def load(examples: int) -> Data:
    """Shuffle scikit-learn's 1797 bundled digits and keep a fifth of them for the test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))[:examples]
    x = (digits.images[order, ..., None] / 16).astype(np.float32)
    y = digits.target[order].astype(np.int64)
    train = len(order) * 4 // 5
    return Data(x[:train], y[:train], x[train:], y[train:])


def build() -> keras.Model:
    """Build and compile the model; seeded, so that every call gives the same one."""
    keras.utils.clear_session()  # names start anew
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(name="digits")
    model.add(keras.Input((8, 8, 1)))
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
        model.add(layers.Dropout(0.25))
    model.add(layers.Flatten())
    model.add(layers.Dense(64, activation="relu"))
    model.add(layers.Dropout(0.5))
    model.add(layers.Dense(10))
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Bar(keras.callbacks.Callback):
    """Moves a progress bar and notes when the first epoch ends."""

    def __init__(self, progress: Progress, task: Any) -> None:
        super().__init__()
        self.first_end = 0.0
        self._progress, self._task = progress, task

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a step and show its loss."""
        self._progress.update(self._task, advance=1, loss=f"{logs['loss']:.4f}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the time."""
        self.first_end = self.first_end or time.perf_counter()


def train(model: keras.Model, data: Data, args: argparse.Namespace, progress: Progress, name: str) -> Run:
    """Train and test a model."""
    steps = args.epochs * -(-len(data.x) // args.batch)
    bar = Bar(progress, progress.add_task(name, total=steps, loss=""))
    began = time.perf_counter()
    history = model.fit(
        data.x,
        data.y,
        batch_size=args.batch,
        epochs=args.epochs,
        shuffle=False,  # the same order for both
        validation_data=(data.x_test, data.y_test),
        verbose=0,
        callbacks=[bar],
    )
    return Run(history.history, bar.first_end - began, time.perf_counter() - bar.first_end)


def curves(one: Run, many: Run, replicas: int) -> Table:
    """Return both learning curves, side by side."""
    table = Table(title="training loss and test accuracy", box=box.SIMPLE_HEAD, title_justify="left")
    for column in (
        "epoch",
        "one device",
        "",
        f"{replicas} replicas",
        "",
        "difference",
        "test, one",
        f"test, {replicas}",
    ):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    highest = max(*one.history["loss"], *many.history["loss"])
    columns = ("loss", "val_accuracy")
    rows = zip(*(run.history[column] for column in columns for run in (one, many)), strict=True)
    for epoch, (left, right, test_left, test_right) in enumerate(rows, 1):
        bars = ["█" * max(1, round(CURVE * loss / highest)) for loss in (left, right)]
        losses = f"{left:.4f}", bars[0], f"{right:.4f}", bars[1], f"{abs(left - right):.1e}"
        table.add_row(str(epoch), *losses, f"{test_left:.2%}", f"{test_right:.2%}")
    return table


def show_times(one: Run, many: Run, replicas: int) -> None:
    """Print what the epochs took; with this small a model the fixed costs of a step dominate."""
    console.print(
        f"first epoch (with tracing and rewriting): {one.first:.1f} s on one device, "
        f"{many.first:.1f} s over {replicas} replicas; all others: {one.rest:.1f} s and {many.rest:.1f} s"
    )


def write(item: ar.GraphItem, config: dict[str, Any], folder: Path) -> None:
    """Write the plan, both graphs for the command line and as text, and the report: one page for a browser."""
    folder.mkdir(parents=True, exist_ok=True)
    ar.build_plan(item, config).save(folder / "plan.yaml")
    new = ar.rewrite(item, config)
    item.save(folder / "graph.ar")
    new.save(folder / "new.ar")
    (folder / "rewritten.txt").write_text(ar.dump(new), encoding="utf-8")
    ar.report(item, folder / "report.html", config)
    (folder / "original.txt").write_text(ar.dump(item), encoding="utf-8")
    console.print(str(new.report), highlight=False, soft_wrap=True)
    console.print(f"\nwrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {folder}/")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--variables", choices=("shared", "mirrored"), default="shared")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--examples", type=int, default=1797, help="use fewer digits, for a quick try")
    parser.add_argument("--accuracy", type=float, default=WANTED_ACCURACY, help="that both runs must reach")
    return parser.parse_args()


def main() -> int:
    """Run the demo; exit with 1 if a run learns too little or verify finds a difference."""
    args, began = arguments(), time.perf_counter()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * args.replicas)
    devices = [f"CPU:{index}" for index in range(args.replicas)]
    config = {"devices": devices, "strategy": {"name": "AllReduce", "variables": args.variables}}
    data = load(args.examples)
    console.print(f"{len(data.x)} digits to learn, {len(data.x_test)} to test; batches of {args.batch}, Adam\n")

    columns = (TextColumn("{task.description:<12}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        one = train(build(), data, args, progress, "one device")
        many = train(ar.distribute(build(), config), data, args, progress, f"{args.replicas} replicas")
    console.print(curves(one, many, args.replicas))
    show_times(one, many, args.replicas)

    console.rule("the rewritten graph")
    images, labels = tf.TensorSpec((None, 8, 8, 1)), tf.TensorSpec((None,), tf.int64)
    write(ar.GraphItem.from_keras(build(), images, labels), config, args.out)

    console.rule("verify: original against rewritten, on random data in float64, where rounding can hide nothing")
    keras.config.set_floatx("float64")
    exact = ar.GraphItem.from_keras(build(), tf.TensorSpec(images.shape, tf.float64), labels)
    report = ar.verify(exact, config, rtol=1e-9)
    console.print(str(report), highlight=False, soft_wrap=True)
    accuracies = [run.history["val_accuracy"][-1] for run in (one, many)]
    learnt = min(accuracies) >= args.accuracy
    verdict = f"test accuracy {accuracies[0]:.2%} on one device, {accuracies[1]:.2%} over {args.replicas} replicas"
    console.print(f"\n{verdict} (wanted: {args.accuracy:.0%}); {time.perf_counter() - began:.0f} s in all")
    return 0 if learnt and report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
