"""The processes of a job: TF_CONFIG, torchrun, MPI, SLURM."""
