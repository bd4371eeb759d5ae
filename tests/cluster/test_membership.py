"""Which process of a job this is: every orchestrator's environment, and what is wrong with it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autograph_rewrite.cluster.launchers import MOST_HOSTS, expand_counts, expand_hosts, is_told
from autograph_rewrite.cluster.membership import Job, Membership, membership_of
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ConfigError
from tests.support import recorded_launchers

A, B, C, D = "10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222", "10.0.0.4:2222"
ALONE = Config()
TWO = Config.of({"cluster": {"workers": [A, B]}})
TWO_AND_ONE = Config.of({"cluster": {"workers": [A, B], "ps": [C]}})
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
ONE_HOST = ("127.0.0.1:29501", "127.0.0.1:29502")


def tf_config(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def slurm(rank: int, **others: str) -> dict[str, str]:
    """Return what srun sets for a task of a step with two nodes, three tasks."""
    return {
        "SLURM_JOB_ID": "41",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[07,11]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_NODEID": "001"[rank],
        "SLURM_LOCALID": "010"[rank],
        **others,
    }


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        (ALONE, tf_config({"worker": [A, B]}, index=1), ((A, B), (), "worker", 1)),
        (ALONE, tf_config({"worker": [A, B], "ps": [C]}, "ps"), ((A, B), (C,), "ps", 0)),
        (ALONE, tf_config({"worker": [A], "ps": [C]}), ((A,), (C,), "worker", 0)),
        (ALONE, tf_config({"chief": [A], "worker": [B, C]}, "chief"), ((A, B, C), (), "worker", 0)),
        (ALONE, tf_config({"chief": [A], "worker": [B, C]}, "worker", 1), ((A, B, C), (), "worker", 2)),
        (ALONE, tf_config({"master": [A], "worker": [B], "ps": [C]}, "master"), ((A, B), (C,), "worker", 0)),
        (ALONE, tf_config({"worker": {"0": A, "1": B}}, index="1"), ((A, B), (), "worker", 1)),
        (ALONE, tf_config({"worker": [A, B], "evaluator": [C]}), ((A, B), (), "worker", 0)),
        (TWO, tf_config({"worker": [C, D]}, index=1), ((C, D), (), "worker", 1)),
        (TWO, {"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'}, ((A, B), (), "worker", 1)),
        (ALONE, {**tf_config({"worker": [A, B]}), **TORCHRUN}, ((A, B), (), "worker", 0)),
        (ALONE, {**TORCHRUN, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, (ONE_HOST, (), "worker", 1)),
        (ALONE, {**TORCHRUN, "MASTER_ADDR": "localhost"}, (ONE_HOST, (), "worker", 1)),
        (
            ALONE,
            {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "AUTOGRAPH_PORT": "700"},
            (("127.0.0.1:700", "127.0.0.1:701"), (), "worker", 1),
        ),
        (TWO, TORCHRUN, ((A, B), (), "worker", 1)),
        (TWO_AND_ONE, {"RANK": "2", "WORLD_SIZE": "3"}, ((A, B), (C,), "ps", 0)),
        (TWO, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ((A, B), (), "worker", 0)),
        (TWO, {"PMI_RANK": "1", "PMI_SIZE": "2"}, ((A, B), (), "worker", 1)),
        (
            ALONE,
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "AUTOGRAPH_PORT": "50"},
            (("127.0.0.1:50", "127.0.0.1:51"), (), "worker", 1),
        ),
        (
            ALONE,
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "AUTOGRAPH_PORT": "50",
            },
            (("127.0.0.1:50", "127.0.0.1:51"), (), "worker", 1),
        ),
        (ALONE, slurm(2), (("n07:28608", "n07:28609", "n11:28608"), (), "worker", 2)),
        (ALONE, slurm(1, AUTOGRAPH_PORT="99"), (("n07:99", "n07:100", "n11:99"), (), "worker", 1)),
        (
            ALONE,
            slurm(1, SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="3", AUTOGRAPH_PORT="9", SLURM_NODEID="0"),
            (("127.0.0.1:9", "127.0.0.1:10", "127.0.0.1:11"), (), "worker", 1),
        ),
        (
            ALONE,
            {**slurm(2), "PMI_RANK": "2", "PMI_SIZE": "3"},
            (("n07:28608", "n07:28609", "n11:28608"), (), "worker", 2),
        ),
        (TWO_AND_ONE, slurm(2), ((A, B), (C,), "ps", 0)),
    ],
)
def test_every_orchestrator_says_it_in_its_own_way(
    config: Config, environ: dict[str, str], expected: tuple[Any, ...]
) -> None:
    member = membership_of(config, environ)
    assert member == Membership(*expected)
    assert is_told(environ)
    assert member.source


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {}, "task": {}}'},
        {"TF_CONFIG": '{"cluster": {"worker": ["h:1"]}}'},
        tf_config({"worker": [A]}),
        tf_config({"chief": [A]}, "chief"),
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"RANK": "3"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"},
        # What runs in a batch script, not started by srun, is one process whatever was allocated.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"},
        # A shell in a job of four tasks is one task.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1"},
        # The innermost launcher knows best.
        {**slurm(1), "WORLD_SIZE": "1", "RANK": "0"},
    ],
)
def test_what_is_not_clearly_a_job_of_several_processes_is_one_process(environ: dict[str, str]) -> None:
    assert membership_of(ALONE, environ) is None
    assert membership_of(Config.of({"cluster": {"workers": [A]}}), environ) is None


@pytest.mark.parametrize(
    ("config", "environ", "words"),
    [
        (TWO, {}, "names 2 processes, and nothing says .*launch"),
        (TWO_AND_ONE, {"WORLD_SIZE": "1", "RANK": "0"}, "names 3 processes"),
        (TWO, {"TF_CONFIG": "{}"}, "names 2 processes"),
        (TWO, tf_config({"worker": [A]}), r"cluster\.workers has 2 in the configuration, but 1 by TF_CONFIG"),
        (TWO, tf_config({"worker": [A, B], "ps": [C]}), r"cluster\.ps has 0 in the configuration, but 1 by TF_CONFIG"),
        (TWO, {"RANK": "0", "WORLD_SIZE": "3"}, "3 processes by WORLD_SIZE, but the configuration names 2 workers"),
        (TWO_AND_ONE, slurm(0, SLURM_STEP_NUM_TASKS="4"), "4 .* SLURM_STEP_NUM_TASKS, .* 2 workers and 1 parameter"),
        (ALONE, {"TF_CONFIG": "{"}, "TF_CONFIG is wrong: it is no JSON"),
        (ALONE, {"TF_CONFIG": "[" * 100_000}, "TF_CONFIG is wrong: it is no JSON"),
        (ALONE, {"TF_CONFIG": "[]"}, "no JSON object, but list"),
        (ALONE, {"TF_CONFIG": '{"cluster": 5}'}, '"cluster" is no JSON object, but 5'),
        (ALONE, {"TF_CONFIG": '{"cluster": {"worker": "h:1"}}'}, '"worker" is no list of addresses'),
        (ALONE, {"TF_CONFIG": '{"cluster": {"worker": [1, 2]}}'}, '"worker" is no list of addresses'),
        (ALONE, tf_config({"worker": {"1": A, "2": B}}), "addresses of the tasks 1, 2 only"),
        (ALONE, {"TF_CONFIG": json.dumps({"cluster": {"worker": [A, B]}})}, 'no "task"'),
        (ALONE, tf_config({"worker": [A, B]}, index=2), "TF_CONFIG: this is worker 2, but there are 2 of them"),
        (ALONE, tf_config({"worker": [A, B]}, index=-1), "task.index is -1, which is no number"),
        (ALONE, tf_config({"chief": [A], "worker": [B]}, index=-1), "task.index is -1"),
        (ALONE, {"TF_CONFIG": "9" * 5000}, "TF_CONFIG is wrong: it is no JSON"),
        (ALONE, tf_config({"worker": [A, B]}, index="x"), "task.index is 'x', which is no number"),
        (ALONE, tf_config({"worker": [A, B]}, index=True), "task.index is True"),
        (ALONE, tf_config({"worker": [A, B]}, "ps"), "this is ps 0, but there is none"),
        (ALONE, tf_config({"worker": [A, B]}, "chief"), "this is chief 0, but the cluster has none"),
        (ALONE, tf_config({"chief": [A], "worker": [B]}, "chief", 1), "this is chief 1, but the cluster has one"),
        (ALONE, tf_config({"worker": [A, B]}, "waiter"), "task.type is 'waiter', which is not chief, master"),
        (ALONE, tf_config({"worker": [A], "waiter": [B]}), "has the job 'waiter'"),
        (ALONE, tf_config({"chief": [A], "master": [B]}), "2 chiefs"),
        (ALONE, tf_config({"ps": [A, B]}, "ps"), "has no worker"),
        (ALONE, tf_config({"worker": [A, B]}, "evaluator"), "evaluator, which takes no part in training"),
        (ALONE, tf_config({"worker": [A, A]}), f"TF_CONFIG: the address {A} stands twice"),
        (ALONE, tf_config({"worker": [A, "h"]}), "TF_CONFIG: must be an address like .* not 'h'"),
        (ALONE, {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        (ALONE, {"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two': it must be a whole number"),
        (ALONE, {"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is 0: it must be at least 1"),
        (ALONE, {"WORLD_SIZE": "2", "RANK": "2"}, r"RANK is 2, but there are 2 processes \(WORLD_SIZE\)"),
        (ALONE, {"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is -1"),
        (ALONE, {**TORCHRUN, "MASTER_ADDR": "n1", "LOCAL_WORLD_SIZE": "1"}, "torchrun .* not where the others are"),
        (ALONE, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI .* not where the others are"),
        # mpirun in a SLURM job starts one helper per node, whose ranks are not those of the processes.
        (ALONE, {**slurm(1), "PMI_RANK": "4", "PMI_SIZE": "6"}, "not where the others are"),
        (ALONE, {**TORCHRUN, "MASTER_ADDR": "::1", "MASTER_PORT": "65534"}, "the port 65536 .*AUTOGRAPH_PORT"),
        (ALONE, {**TORCHRUN, "MASTER_ADDR": "::1", "AUTOGRAPH_PORT": "x"}, "AUTOGRAPH_PORT is 'x'"),
        (ALONE, slurm(0, SLURM_STEP_NODELIST="n[7-"), "SLURM_STEP_NODELIST is 'n"),
        (ALONE, slurm(0, SLURM_STEP_TASKS_PER_NODE="2(x"), "SLURM_STEP_TASKS_PER_NODE is '2"),
        (ALONE, slurm(0, SLURM_STEP_TASKS_PER_NODE="2(x2)"), "puts 4 tasks on 2 nodes, but 3 tasks"),
        (ALONE, slurm(0, SLURM_STEP_TASKS_PER_NODE=""), "puts 2 tasks on 2 nodes, but 3 tasks"),
        (ALONE, slurm(1, SLURM_NODEID="1", SLURM_LOCALID="0"), "SLURM_NODEID is 1, .*--distribution=block"),
        (ALONE, slurm(0, SLURM_JOB_ID="x"), "SLURM_JOB_ID is 'x'"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_variable(
    config: Config, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        membership_of(config, environ)
    assert re.search(words, str(error.value), re.DOTALL), str(error.value)


@pytest.mark.parametrize("job", recorded_launchers.JOBS)
def test_every_process_that_a_real_launcher_starts_knows_its_job(job: str) -> None:
    environs = recorded_launchers.JOBS[job]
    members = [membership_of(ALONE, environ) for environ in environs]
    assert [member and member.task for member in members] == list(range(len(environs)))
    (addresses,) = {member.addresses for member in members if member}
    assert len(addresses) == len(environs)
    assert all(map(is_told, environs))


def test_the_addresses_of_a_real_step_are_its_nodes_in_turn() -> None:
    member = membership_of(ALONE, {**recorded_launchers.JOBS["srun -N2 -n3"][0], "AUTOGRAPH_PORT": "7"})
    assert member is not None
    assert member.addresses == ("ar1:7", "ar1:8", "ar2:7")


@pytest.mark.parametrize("environ", recorded_launchers.ALONE.values(), ids=recorded_launchers.ALONE)
def test_a_program_that_a_real_launcher_started_alone_is_one_process(environ: dict[str, str]) -> None:
    assert membership_of(ALONE, environ) is None


def test_a_real_step_whose_tasks_go_round_its_nodes_is_refused_by_name() -> None:
    cyclic = recorded_launchers.srun("ar[1-2]", "3,1", [(0, 0), (1, 0), (0, 1), (0, 2)])
    with pytest.raises(ConfigError, match=r"SLURM_NODEID is 1(.|\n)*--distribution=block"):
        membership_of(ALONE, cyclic[1])


def test_a_conflict_is_told_at_the_line_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"devices: [CPU:0]\ncluster:\n  workers: [{A}, {B}]\n")
    with pytest.raises(ConfigError) as error:
        membership_of(Config.load(path), {})
    assert error.value.where == f"{path}:2"


def test_neighbouring_slurm_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = set()
    for job in range(40, 50):
        for step in range(5):
            member = membership_of(ALONE, slurm(0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)))
            assert member is not None
            ports.add(int(member.address.rpartition(":")[2]))
    assert len(ports) == 50
    assert all(1024 < port < 32768 for port in ports)


def test_a_member_knows_itself_and_the_others() -> None:
    worker, server = Membership((A, B), (C,), "worker", 1), Membership((A, B), (C,), "ps", 0)
    assert (worker.address, worker.index, worker.name, worker.is_chief, worker.is_worker) == (
        B,
        1,
        "worker 1",
        False,
        True,
    )
    assert (server.address, server.index, server.name, server.is_chief, server.is_worker) == (
        C,
        2,
        "ps 0",
        False,
        False,
    )
    assert Membership((A, B), (), "worker", 0).is_chief
    assert worker.cluster == {"worker": [A, B], "ps": [C]}
    assert Membership((A, B), (), "worker", 0).cluster == {"worker": [A, B]}


addresses = st.lists(st.integers(1, 65535), min_size=2, max_size=6, unique=True).map(
    lambda ports: tuple(f"h{port}.example:{port}" for port in ports)
)


@given(addresses, st.data())
def test_what_a_member_writes_as_tf_config_is_read_as_the_same_member(all_of: tuple[str, ...], data: Any) -> None:
    workers = data.draw(st.integers(1, len(all_of)))
    index = data.draw(st.integers(0, len(all_of) - 1))
    job: Job = "worker" if index < workers else "ps"
    member = Membership(all_of[:workers], all_of[workers:], job, index - (workers if job == "ps" else 0))
    assert membership_of(ALONE, {"TF_CONFIG": member.tf_config}) == member
    assert membership_of(member.applied_to(ALONE), {"TF_CONFIG": member.tf_config}) == member
    assert member.addresses[member.index] == member.address


def test_the_addresses_of_the_job_replace_those_of_the_configuration() -> None:
    config = Config.of({"cluster": {"workers": [A, B], "network": {"bandwidth_gbps": 1.0}}})
    new = Membership((C, D), (), "worker", 0).applied_to(config)
    assert new.cluster is not None
    assert (new.cluster.workers, new.cluster.network) == ((C, D), config.cluster and config.cluster.network)
    assert Membership((C, D), (), "worker", 0).applied_to(ALONE).mode == "mirrored"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("node[01-03,07],other", ["node01", "node02", "node03", "node07", "other"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("[1-2]", ["1", "2"]),
        ("a.b-c,d_e", ["a.b-c", "d_e"]),
    ],
)
def test_host_lists_are_written_out(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[x]", "a[3-1]", "a[1,]", "a[[1]]", "a[1-9999999]"],
)
def test_a_malformed_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand_hosts(text)


def test_a_list_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=f"more than {MOST_HOSTS:,}"):
        expand_hosts("a[1-99999]b[1-99999]c[1-99999]")
    with pytest.raises(ValueError, match=f"more than {MOST_HOSTS:,}"):
        expand_counts("1(x999999)")


def test_counts_of_tasks_are_written_out() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    assert expand_counts("16") == (16,)


names = st.from_regex(r"[a-z][a-z0-9.-]{0,5}[a-z]", fullmatch=True)


@st.composite
def written_lists(draw: Any) -> tuple[str, list[str]]:
    """Draw a host list as SLURM would write it, and the hosts that it stands for."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix, suffix = draw(names), draw(st.sampled_from(["", "-ib", ".local"]))
        width = draw(st.integers(1, 4))
        numbers = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=3))
        if not numbers:
            texts.append(prefix + suffix)
            hosts.append(prefix + suffix)
            continue
        parts = []
        for first, more in numbers:
            parts.append(f"{first:0{width}d}-{first + more:0{width}d}" if more else f"{first:0{width}d}")
            hosts += [f"{prefix}{number:0{width}d}{suffix}" for number in range(first, first + more + 1)]
        texts.append(f"{prefix}[{','.join(parts)}]{suffix}")
    return ",".join(texts), hosts


@given(written_lists())
def test_whatever_is_written_as_a_host_list_is_read_as_the_same_hosts(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert list(expand_hosts(text)) == hosts


@settings(max_examples=200)
@given(st.text(alphabet="an[]-,01x()", max_size=12))
def test_no_text_breaks_the_expansion(text: str) -> None:
    for expand in (expand_hosts, expand_counts):
        with suppress(ValueError):
            assert len(expand(text)) >= 1
