#!/bin/bash
# An elastic job on several nodes of a SLURM cluster: sbatch examples/slurm_elastic.sh train.py --epochs 3
# A script that names no configuration: CONFIG=config.yaml sbatch examples/slurm_elastic.sh train.py
#
# Each node runs one agent; they meet on the first two nodes. A node that is lost does not take the job with it:
# --no-kill keeps the allocation, and no task of the step is ended because another one failed.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --no-kill
#SBATCH --time=08:00:00

set -eu

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 2)
port=${AUTOGRAPH_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
endpoints=$(for node in $nodes; do echo "$node:$port"; done | paste -sd,)
AUTOGRAPH_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n') # srun hands it on, and nothing else sees it
export AUTOGRAPH_TOKEN

exec srun --kill-on-bad-exit=0 --no-kill --cpu-bind=cores \
  autograph-rewrite launch --elastic "${WORKERS:-2:4}" --rdzv-endpoint "$endpoints" \
  --nproc-per-node "${WORKERS_PER_NODE:-1}" ${CONFIG:+--config "$CONFIG"} "$@"
