"""YAML with places: data as written, and the line of whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from autograph_rewrite.diagnostics import located_yaml
from autograph_rewrite.diagnostics.located_yaml import Located, Source, load_yaml, parse_yaml
from autograph_rewrite.errors import ConfigError


def parse(text: str) -> Located:
    return parse_yaml(text, file="a.yaml", error=ConfigError)


def test_every_key_and_item_has_its_place() -> None:
    source = parse("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n").source
    lines = {located_yaml.dotted(path): line for path, line in source.lines.items()}
    assert lines == {"": 1, "a": 1, "a.b": 2, "a.c": 3, "a.c[0]": 4, "a.c[1]": 5, "a.c[1].d": 5}


def test_a_path_that_is_not_there_has_the_place_of_what_is_around_it() -> None:
    source = parse("a:\n  b: 1\n").source
    assert source.at(("a", "missing", 3)) == "a.yaml:1"
    assert source.at(("a", "b")) == "a.yaml:2"
    assert Source("config").at(("a", "b")) == "config"


def test_keys_and_dates_stay_text() -> None:
    assert parse("on: 2024-01-01\n1: 1f1b\nno: none\n").data == {
        "on": "2024-01-01",
        "1": "1f1b",
        "no": "none",
    }


def test_scalars_are_read_as_yaml_reads_them() -> None:
    text = "[1, 0x10, 1_000, 1.5, .inf, true, null, ~, '1', 127.0.0.1:80]"
    assert parse(text).data == [1, 16, 1000, 1.5, float("inf"), True, None, None, "1", "127.0.0.1:80"]


def test_an_alias_stands_for_its_anchor() -> None:
    assert parse("a: &x [1]\nb: *x\n").data == {"a": [1], "b": [1]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3: the key 'a' stands here twice (first in line 1)"),
        ("a: {b: 1,\n b: 2}\n", "a.yaml:2: the key 'b' stands here twice (first in line 1)"),
        ("a: &x\n  b: *x\n", "a.yaml:1: an alias in here stands for what is around it"),
        ("a: 1\n<<: {b: 2}\n", "a.yaml:2: merge keys (<<) are not supported; write the keys out"),
        ("a: !!python/name:os.system x\n", "a.yaml:1: the tag python/name:os.system is not supported"),
        ("a: !!binary aGk=\n", "a.yaml:1: the tag binary is not supported"),
        ("a: !!int x\n", "a.yaml:1: 'x' cannot be read"),
        ("? [a]\n: 1\n", "a.yaml:1: a key must be a word"),
    ],
)
def test_what_yaml_allows_and_a_configuration_does_not_is_a_fault_at_its_line(text: str, said: str) -> None:
    assert [str(fault) for fault in parse(text).faults] == [said]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2\n", "a.yaml:2: this is not YAML"),
        ("a:\n\tb: 1\n", "a.yaml:2: this is not YAML"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2: this is not YAML"),
        ("a: *missing\n", "a.yaml:1: this is not YAML: .*found undefined alias"),
        ("a: \x00\n", "a.yaml:1: this is not YAML"),
        ("# nothing\n", "a.yaml: the file is empty"),
        ("", "a.yaml: the file is empty"),
    ],
)
def test_what_is_no_yaml_is_an_error_at_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_aliases_of_aliases_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(located_yaml, "_MAX_ALIASED", 1000)
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    with pytest.raises(ConfigError, match=r"its aliases .* write more than 1,000 values"):
        parse("\n".join(lines))


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    for text in ("[" * 50_000, "{a: " * 50_000, "- " * 50_000):
        with pytest.raises(ConfigError, match="nested too deeply"):
            parse(text)
    links = ["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 2000))]
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse("\n".join(links))


def test_a_file_is_read_with_its_mark_and_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_yaml(path, error=ConfigError).data == {"a": 1}
    assert load_yaml(str(path), error=ConfigError).source.at(("a",)) == f"{path}:1"


def test_files_that_cannot_be_read_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*none\.yaml'"):
        load_yaml(tmp_path / "none.yaml", error=ConfigError)
    with pytest.raises(ConfigError, match=r"cannot read .*directory"):
        load_yaml(tmp_path, error=ConfigError)
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: this is not UTF-8 text"):
        load_yaml(tmp_path / "latin.yaml", error=ConfigError)
