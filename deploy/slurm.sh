#!/bin/bash
# A run with one process per GPU: sbatch deploy/slurm.sh. The script requeues it after a preemption,
# the time limit or the death of a process, at most 100 times.
#SBATCH --job-name=vit
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=24:00:00 --requeue --signal=TERM@120 --open-mode=append --output=vit-%j.log
export TFDS_DATA_DIR=/shared/tfds
# Without --kill-on-bad-exit=0, Slurm would kill the other processes before they report the reason.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" .venv/bin/python -m vit_jax.train \
  --config=configs/pretrain/augreg.py:i1k,B/16 --config.data=tfds:imagenet2012 \
  --config.checkpoint_every_steps=1000 --workdir=/shared/run "$@"
code=$?
case $code in
75 | 134 | 137 | 139 | 143) # vit_jax requests a restart, or a process crashed or was killed
  [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
