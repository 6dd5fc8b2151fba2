#!/bin/bash
# A run with one process per GPU: sbatch deploy/slurm.sh. The script requeues it after a preemption,
# the time limit or the death of a process, at most 100 times, and at most 3 times in a row if no
# training step was completed since the last start.
#SBATCH --job-name=vit
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=24:00:00 --requeue --signal=TERM@120 --open-mode=append --output=vit-%j.log
export TFDS_DATA_DIR=/shared/tfds
workdir=/shared/run
stalled=vit-$SLURM_JOB_ID.stalled # number of starts in a row without a step

# Prints how often steps were reported, and at how many steps checkpoints were saved, in all starts.
count_steps() {
  grep -s '"event": "reported"' "$workdir/events.jsonl" | wc -l
  grep -so '"event": "saving", "step": [0-9]*' "$workdir/events.jsonl" | sort -u | wc -l
}

before=$(count_steps)
# Without --kill-on-bad-exit=0, Slurm would kill the other processes before they report the reason.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" .venv/bin/python -m vit_jax.train \
  --config=configs/pretrain/augreg.py:i1k,B/16 --config.data=tfds:imagenet2012 \
  --config.checkpoint_every_steps=1000 --workdir="$workdir" "$@"
code=$?
starts=0
if [ "$(count_steps)" = "$before" ]; then
  starts=$(($(cat "$stalled" 2>/dev/null || echo 0) + 1))
fi
echo "$starts" >"$stalled"
case $code in
75 | 134 | 137 | 139 | 143) # vit_jax requests a restart, or a process crashed or was killed
  if [ "$starts" -gt 3 ]; then
    echo "not requeued: no step in the last $starts starts" >&2
  elif [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi ;;
esac
exit $code
