"""Windows: what rows they read, against counting them one by one."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from autograph_rewrite.ops.facts.windows import Window


@st.composite
def windows(draw: st.DrawFn) -> Window:
    size, stride = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    before, after = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
    rows = draw(st.integers(1, 20))
    assume(rows + before + after >= size)
    return Window(size, stride, before, rows, (rows + before + after - size) // stride + 1)


def seen(window: Window, output: int) -> set[int]:
    first = output * window.stride - window.before
    return set(range(first, first + window.size)) & set(range(window.rows))


@given(windows(), st.data())
def test_outputs_read_the_rows_of_their_windows(window: Window, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, window.outputs - 1))
    end = data.draw(st.integers(begin + 1, window.outputs))
    wanted = set[int]().union(*(seen(window, output) for output in range(begin, end)))
    first, last = window.read((begin, end))
    assert wanted <= set(range(first, last))
    assert not wanted or (first, last) == (min(wanted), max(wanted) + 1)


@given(windows(), st.data())
def test_the_gradient_of_rows_comes_from_whole_windows(window: Window, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, window.rows - 1))
    end = data.draw(st.integers(begin + 1, window.rows))
    first, last = window.readers((begin, end))
    assert 0 <= first < last <= window.outputs
    assert {o for o in range(window.outputs) if seen(window, o) & set(range(begin, end))} <= set(range(first, last))
    lower, upper = window.neighbours((begin, end))
    assert lower <= begin
    assert end <= upper
    # The kernel finds as many outputs in these rows and their padding.
    start, stop = window.covered((first, last))
    padded = (upper - lower) + max(0, -start) + max(0, stop - window.rows)
    assert (padded - window.size) // window.stride + 1 == last - first
