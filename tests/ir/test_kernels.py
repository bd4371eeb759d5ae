"""The shipped table of GPU kernels says what TensorFlow's GPU build registers."""

from __future__ import annotations

from types import SimpleNamespace as Some

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.kernels import Kernel, find_kernel
from autograph_rewrite.tools.dev.make_kernels import rows


def of(op: str, **types: int) -> Kernel | None:
    return find_kernel(op, {name: encode("type", dtype) for name, dtype in types.items()})


def test_integers_of_32_bits_are_added_on_the_host_and_floats_on_the_device() -> None:
    assert of("AddV2", T=dtypes.FLOAT) == Kernel("GPU", (False, False), (False,))
    integers = of("AddV2", T=dtypes.INT32)
    assert integers is not None
    assert integers.on_host


def test_an_op_or_a_type_without_a_kernel_has_none() -> None:
    assert of("AsString", T=dtypes.FLOAT) is None
    assert of("AddV2", T=dtypes.STRING) is None
    assert of("NoSuchOp") is None


def test_sizes_are_read_from_host_memory_and_resources_are_always_there() -> None:
    assert of("Reshape", T=dtypes.FLOAT, Tshape=dtypes.INT32) == Kernel("GPU", (False, True), (False,))
    assert of("ReadVariableOp", dtype=dtypes.FLOAT) == Kernel("DEFAULT", (True,), (False,))


def test_an_attribute_that_a_node_leaves_out_has_its_default() -> None:
    assert of("Shape", T=dtypes.FLOAT) == Kernel("GPU", (False,), (True,))


def test_a_kernel_with_a_label_serves_only_nodes_that_ask_for_it() -> None:
    types = {"T": encode("type", dtypes.INT32)}
    plain, labelled = find_kernel("DataFormatDimMap", types), encode("string", "host")
    assert plain == Kernel("GPU", (False,), (False,))
    assert find_kernel("DataFormatDimMap", {**types, "_kernel": labelled}) == Kernel("DEFAULT", (True,), (True,))


def test_operands_of_a_list_count_one_by_one() -> None:
    attrs = {"N": encode("int", 3), "T": encode("type", dtypes.FLOAT), "Tidx": encode("type", dtypes.INT32)}
    assert find_kernel("ConcatV2", attrs) == Kernel("GPU", (False, False, False, True), (False,))


def _kernel(device: str, host: tuple[str, ...] = (), **types: tuple[int, ...]) -> Some:
    allowed = [
        Some(name=name, allowed_values=Some(list=Some(type=each, s=(), i=(), b=()))) for name, each in types.items()
    ]
    return Some(op="Op", device_type=device, host_memory_arg=host, priority=0, label="", constraint=allowed)


def test_kernels_that_differ_in_types_share_a_row_only_where_all_combinations_exist() -> None:
    names = {1: "float32", 2: "float64", 3: "int32", 9: "int64"}
    full = [_kernel("GPU", T=(t,), S=(s,)) for t in (1, 2) for s in (3, 9)]
    assert rows(full, names) == ["Op\tGPU\tS=int32,int64 T=float32,float64\t-\t0\t-"]
    assert rows([*full[:3]], names) == [
        "Op\tGPU\tS=int32 T=float64\t-\t0\t-",
        "Op\tGPU\tS=int32,int64 T=float32\t-\t0\t-",
    ]
    assert rows([_kernel("CPU", T=(1,)), _kernel("GPU", ("y", "x"), T=(3,))], names) == ["Op\tGPU\tT=int32\tx,y\t0\t-"]
