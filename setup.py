"""Package several trees as one: `strategies/`, `tools/` and `configs/` go below `autograph_rewrite`."""

from pathlib import Path

from setuptools import find_packages, setup

MAPPED = ("strategies", "tools", "configs")

TESTS = ["hypothesis", "pytest>=8", "pytest-timeout", "pytest-xdist"]
CHECKS = ["mypy", "ruff", "types-regex", "types-PyYAML", "types-networkx", "types-protobuf"]
DEMO = ["scikit-learn"]
DOCS = ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]  # the site: `make docs`
RAY = ["ray>=2.9"]  # for examples/ray_launch.py

# Of the libraries of tests/corpus, those that leave TensorFlow and numpy alone, and what the others need.
# The others come without dependencies: tests/corpus/no_dependencies.txt.
CORPUS = [
    "check-shapes",
    "cloudpickle",
    "deprecated",
    "dm-sonnet>=2.0.2",
    "etils",
    "gin-config",
    "huggingface-hub<1",
    "immutabledict",
    "kagglehub",
    "kagglesdk",
    "lxml",
    "matplotlib",
    "multipledispatch",
    "networkx",
    "pandas",
    "pillow",
    "promise",
    "psutil",
    "pyarrow",
    "pycocotools",
    "safetensors",
    "sentencepiece",
    "simple-parsing",
    "tensorflow-probability>=0.25",
    "tf-slim>=1.1",
    "tokenizers<0.23",
    "toml",
    "tqdm",
]


def mapped_packages() -> list[str]:
    """Return the installed names of the packages whose sources lie beside `autograph_rewrite`."""
    return [
        ".".join(("autograph_rewrite", top, *below))
        for top in MAPPED
        for below in [(), *((name,) for name in find_packages(top))]
    ]


setup(
    name="autograph-rewrite",
    version="0.1.0",
    description="Rewrite an unmodified single-device TensorFlow training graph into an exact distributed one",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=[*find_packages(include=["autograph_rewrite", "autograph_rewrite.*"]), *mapped_packages()],
    package_dir={f"autograph_rewrite.{top}": top for top in MAPPED},
    package_data={
        "": ["*.pyi"],
        "autograph_rewrite": ["py.typed"],
        "autograph_rewrite.configs": ["*.yaml"],
        "autograph_rewrite.inspect": ["page/*"],
        "autograph_rewrite.ir.types": ["*.binpb", "*.binpb.gz", "*.tsv"],
        "autograph_rewrite.plan": ["*.binpb", "*.proto", "*.json"],
    },
    # TensorFlow is no hard dependency: `tensorflow` and `tensorflow-cpu` install the same files, so naming
    # one of them would overwrite the other for whoever has it. The extras choose; `requires.py` checks.
    install_requires=[
        "grpcio>=1.60",  # TensorFlow needs it as well
        "keras>=3.0.5,<4",
        "networkx>=3.2",
        "numpy>=1.26",
        "protobuf>=4.25,<8",
        "pydantic>=2.6",
        "pyyaml>=6",
        "regex>=2024.4",  # as `re`, but a search can be ended
        "rich>=13",
    ],
    extras_require={
        "tensorflow": ["tensorflow>=2.16,<2.22"],
        "cpu": ["tensorflow-cpu>=2.16,<2.22"],
        "corpus": CORPUS,
        "demo": DEMO,
        "docs": DOCS,
        "ray": RAY,
        "dev": [*TESTS, *CHECKS, *DEMO, "setuptools>=77", "wheel"],
    },
    entry_points={"console_scripts": ["autograph-rewrite = autograph_rewrite.tools.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Compilers",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
