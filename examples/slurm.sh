#!/bin/bash
# Training on several nodes of a SLURM cluster: sbatch examples/slurm.sh train.py --epochs 3
#
# srun tells every task its rank and the nodes of the step, and that is all a process needs to find the others.
# A script that names no configuration: CONFIG=config.yaml sbatch examples/slurm.sh train.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --open-mode=append
#SBATCH --requeue

set -eu

# Two jobs of yours on one node get ports of their own by their job numbers. Where a firewall opens certain ports only:
# export AUTOGRAPH_PORT=2222

# --kill-on-bad-exit ends the step when one task fails: the job is one thing, and so is its failure.
# --distribution=block puts rank after rank on a node before the next one is filled; the addresses are derived from that.
step=(srun --kill-on-bad-exit=1 --distribution=block --cpu-bind=cores)

# After a failure the whole step starts anew, from the last checkpoint. A node that is lost takes the allocation with it:
# then --requeue brings the job back.
for AUTOGRAPH_RESTART in 0 1 2 3; do
  export AUTOGRAPH_RESTART
  "${step[@]}" autograph-rewrite run ${CONFIG:+--config "$CONFIG"} "$@" && exit 0
  echo "the step failed (start $((AUTOGRAPH_RESTART + 1)) of 4)" >&2
done
exit 1
