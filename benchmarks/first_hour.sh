#!/usr/bin/env bash
# Measures how a TPU or GPU host reads a bucket: benchmarks/first_hour.sh gs://BUCKET/DATA gs://BUCKET/RUNS
# Prepared on a machine without a network; not run on Google Cloud yet.
set -euo pipefail
data=$1
runs=$2
experiment=(--config=configs/pretrain/augreg.py:i1k,B/16 --config.data="$data")

echo '== devices, permissions, MB/s and latency of the bucket'
python -m vit_jax.doctor "${experiment[@]}" --workdir="$runs/first_hour"
echo '== the index: reads all shards once, then only the index'
time python -m vit_jax.index --data="$data"
time python -m vit_jax.index --data="$data"
echo '== batches without a training step: images per second, and per CPU second with TLS'
python -m benchmarks.bucket measure "$data" --seconds=60
echo '== microseconds under the lock of Python, and the rate with many cores'
python -m benchmarks.input_speed --alone=simulated
echo '== 500 steps: the last line gives the seconds of data wait'
python -m vit_jax.train "${experiment[@]}" --config.total.steps=500 \
  --workdir="$runs/first_hour"
