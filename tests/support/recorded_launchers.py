"""What real launchers set: recorded from SLURM 22.05.8, Open MPI 4.1.4 and MPICH 4.0.2, of each process in turn.

What concerns neither ranks nor addresses is left out.
"""

from __future__ import annotations


def srun(nodes: str, tasks_per_node: str, places: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Return what the tasks of a step find.

    Args:
        nodes: the list of nodes, as SLURM writes it.
        tasks_per_node: the tasks of each, as SLURM writes it.
        places: node and number on that node of each task.
    """
    size, hosts = str(len(places)), str(1 + max(node for node, _ in places))
    shared = {
        "SLURM_JOB_ID": "26",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NNODES": hosts,
        "SLURM_NPROCS": size,
        "SLURM_NTASKS": size,
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_LAUNCHER_PORT": "40785",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": hosts,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_TASKS_PER_NODE": tasks_per_node,
    }
    return [
        {**shared, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        for rank, (node, local) in enumerate(places)
    ]


def _mpirun(rank: int, local: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMMAND": "python",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMIX_NAMESPACE": "118161409",
        "PMIX_RANK": str(rank),
    }


_ONE_NODE = srun("ar1", "2", [(0, 0), (0, 1)])
_TWO_NODES = srun("ar[1-2]", "1(x2)", [(0, 0), (1, 0)])

JOBS = {
    "srun -N1 -n2": _ONE_NODE,
    "srun -N2 -n3": srun("ar[1-2]", "2,1", [(0, 0), (0, 1), (1, 0)]),
    "srun -N3 -n3": srun("ar[1-3]", "1(x3)", [(0, 0), (1, 0), (2, 0)]),
    "srun --mpi=pmi2 -N1 -n2": [
        {**task, "PMI_FD": "11", "PMI_JOBID": "26.0", "PMI_RANK": str(rank), "PMI_SIZE": "2"}
        for rank, task in enumerate(_ONE_NODE)
    ],
    "srun --mpi=pmix -N1 -n2": [
        {**task, "PMIX_NAMESPACE": "slurm.pmix.26.0", "PMIX_RANK": str(rank)} for rank, task in enumerate(_ONE_NODE)
    ],
    "mpirun -n 2": [_mpirun(rank, rank, 2) for rank in range(2)],
    "sbatch -N2, in it srun": _TWO_NODES,
    # It starts its helpers by srun, and each process has the variables of the helper that has started it.
    "sbatch -N2, in it mpirun": [{**task, **_mpirun(rank, 0, 1)} for rank, task in enumerate(_TWO_NODES)],
    "mpiexec.mpich -n 2": [
        {
            "MPI_LOCALNRANKS": "2",
            "MPI_LOCALRANKID": str(rank),
            "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
            "PMI_FD": "8",
            "PMI_RANK": str(rank),
            "PMI_SIZE": "2",
        }
        for rank in range(2)
    ],
}

_ALLOCATED = {"SLURM_JOB_ID": "26", "SLURM_JOB_NODELIST": "ar1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
ALONE = {
    "salloc -n2": _ALLOCATED,
    "sbatch -n2": {**_ALLOCATED, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "srun -n1": srun("ar1", "1", [(0, 0)])[0],
}
"""Programs that are one process, whatever was allocated."""
