"""Which combinations run: a pairwise cover in every test run, and everything that is worth an hour.

The cover pairs each optimizer with each *form* that a gradient can come in (dense, sparse, out of a loop, out
of a branch), each number of replicas and both ways to keep variables, and everything else with each model; the
full set has every optimizer on every model, both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from autograph_rewrite.config.strategy_names import KNOWN
from tests.zoo import FUNCTIONS, GRAPHS, MODELS, ZOO, Case, optimizers_for

from .cover import pairwise

EVEN = 12  # rows that 2, 3 and 4 replicas share equally
PRIME = 7
STEPS = 3


@dataclass(frozen=True)
class MatrixCase:
    """One training run and how it is distributed."""

    model: str
    optimizer: str
    replicas: int
    variables: str  # mirrored or shared
    batches: str  # even, prime, few (fewer rows than replicas) or changing
    reduction: str = "mean"
    static: bool = False
    dtype: str = "float64"
    strategy: str = "AllReduce"

    def __str__(self) -> str:
        """Return the test id."""
        shape = "static" if self.static else "open"
        name = "" if self.strategy == "AllReduce" else f"{self.strategy}-"
        return (
            f"{name}{self.model}-{self.optimizer}-{self.replicas}x{self.variables}-{self.batches}"
            f"-{self.reduction}-{shape}-{self.dtype}"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the batch size of each step."""
        few = self.replicas - 1
        return {
            "even": (EVEN,) * STEPS,
            "prime": (PRIME,) * STEPS,
            "few": (few,) * STEPS,
            "changing": (EVEN, few, PRIME),
        }[self.batches]


# Conv nets and attention hand optimizers nothing but dense gradients.
FORMS = {"conv": "dense", "attention": "dense"}
REPLICAS = (2, 3, 4)
VARIABLES = ("mirrored", "shared")
BATCHES = ("even", "prime", "few", "changing")
OPEN_ONLY = ("few", "changing")  # a static batch cannot change, and one below the number of replicas is refused
REDUCTIONS = ("mean", "sum")
STRATEGIES = tuple(name for name in KNOWN if name not in ("AllReduce", "Pipeline"))


def cases_pairwise() -> list[MatrixCase]:
    """Return the cases of every test run."""
    cases = [*_cover(GRAPHS), *_cover((*FUNCTIONS, *MODELS)), *_in_float32(), *_on_servers()]
    return list(dict.fromkeys(cases))


def cases_full() -> list[MatrixCase]:
    """Return all cases: the pairwise ones first, then every model with every optimizer in both modes."""
    return list(dict.fromkeys([*cases_pairwise(), *_every_optimizer_on_every_model()]))


def cases_builders() -> list[MatrixCase]:
    """Return each strategy on two models at least, and each model once; all else takes turns."""
    found: list[MatrixCase] = []
    for (i, case), (j, strategy) in product(enumerate(ZOO.values()), enumerate(STRATEGIES)):
        if (i + j) % 8 == 0:
            turn, optimizers = len(found), optimizers_for(case.kind)
            found.append(
                MatrixCase(
                    model=case.name,
                    optimizer=optimizers[turn % len(optimizers)],
                    replicas=REPLICAS[turn % 3],
                    variables=VARIABLES[turn % 2],
                    batches=BATCHES[turn // 2 % 4],
                    dtype=case.dtypes[0],
                    strategy=strategy,
                )
            )
    return found


def cases_builders_full() -> list[MatrixCase]:
    """Return every strategy with every optimizer on every model."""
    return list(_by_strategy())


def _by_strategy() -> Iterator[MatrixCase]:
    everything = ((case, o) for case in ZOO.values() for o in optimizers_for(case.kind))
    for i, ((case, optimizer), strategy) in enumerate(product(everything, STRATEGIES)):
        yield MatrixCase(
            model=case.name,
            optimizer=optimizer,
            replicas=REPLICAS[i % 3],
            variables=VARIABLES[i % 2],
            batches=BATCHES[i % 4],
            dtype=case.dtypes[0],
            strategy=strategy,
        )


def _cover(entries: tuple[Case, ...]) -> Iterator[MatrixCase]:
    forms = {case.name: FORMS.get(case.family, case.family) for case in entries}
    factors = {
        "model": tuple(forms),
        "optimizer": optimizers_for(entries[0].kind),
        "form": tuple(dict.fromkeys(forms.values())),
        "replicas": REPLICAS,
        "variables": VARIABLES,
        "batches": BATCHES,
        "reduction": REDUCTIONS,
        "static": (False, True),
    }

    def allowed(row: Mapping[str, object]) -> bool:
        if "form" in row and "model" in row and forms[str(row["model"])] != row["form"]:
            return False
        return not (row.get("static") and row.get("batches") in OPEN_ONLY)

    optimizers = [frozenset(("optimizer", name)) for name in ("model", "batches", "reduction", "static")]
    others = [{**vars(case), "form": forms[case.model]} for case in _in_float32() if case.model in forms]
    for row in pairwise(factors, allowed, skip=optimizers, covered=others):
        choice = {name: value for name, value in row.items() if name != "form"}
        yield MatrixCase(**choice, dtype=ZOO[str(row["model"])].dtypes[0])  # type: ignore[arg-type]


def _in_float32() -> Iterator[MatrixCase]:
    """Run every model once in the precision of real training, with an optimizer that damps rounding."""
    for i, case in enumerate(ZOO.values()):
        batches = BATCHES[i % 4]
        yield MatrixCase(
            model=case.name,
            optimizer=("sgd", "adagrad")[i % 2],
            replicas=REPLICAS[i % 3],
            variables=VARIABLES[i // 2 % 2],
            batches=batches,
            reduction=REDUCTIONS[i // 4 % 2],
            static=batches not in OPEN_ONLY,
            dtype="float32",
        )


def _on_servers() -> Iterator[MatrixCase]:
    """Run models whose variables live on one device each, or on the replicas' first."""
    rows = (
        ("PS", "mlp", "adam", 3, "mirrored"),
        ("PS", "lstm_v1", "rmsprop", 2, "shared"),
        ("PS", "cond_v1", "ftrl", 2, "mirrored"),
        ("PS", "loss_scaling", "adam", 2, "mirrored"),
        ("PS", "keras_cnn", "adam", 2, "shared"),
        ("PSLoadBalancing", "cnn", "momentum", 2, "mirrored"),
        ("PSLoadBalancing", "language_model", "adagrad", 3, "mirrored"),
        ("PSLoadBalancing", "function_sparse", "adam", 2, "shared"),
        ("Parallax", "language_model", "adam", 3, "mirrored"),
        ("Parallax", "keras_two_inputs", "adagrad", 2, "mirrored"),
    )
    for strategy, model, optimizer, replicas, variables in rows:
        dtype = ZOO[model].dtypes[0]
        yield MatrixCase(model, optimizer, replicas, variables, "changing", dtype=dtype, strategy=strategy)


def _every_optimizer_on_every_model() -> Iterator[MatrixCase]:
    everything = ((case, optimizer) for case in ZOO.values() for optimizer in optimizers_for(case.kind))
    for i, ((case, optimizer), variables) in enumerate(product(everything, VARIABLES)):
        batches = BATCHES[i // 2 % 4]
        yield MatrixCase(
            model=case.name,
            optimizer=optimizer,
            replicas=REPLICAS[i // 3 % 3],
            variables=variables,
            batches=batches,
            reduction=REDUCTIONS[i // 5 % 2],
            static=batches not in OPEN_ONLY and i // 7 % 2 == 0,
            dtype=case.dtypes[0],
        )
