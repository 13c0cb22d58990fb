#!/bin/bash
# Two nodes with four GPUs each: one instance per node, with four replicas.
#SBATCH --job-name=openipu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
set -euo pipefail

# If one instance fails, Slurm ends the others.
srun --kill-on-bad-exit=1 python train.py
