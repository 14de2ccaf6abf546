#!/usr/bin/env bash
#SBATCH --job-name=tinkercloud
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
# A Ray over the job's nodes, and the server on the first of them. DATA and the environments must lie
# on a file system that every node sees. SERVER_ENV holds `tinkercloud[cluster,cuda]`, SGLANG_ENV
# sglang and tinkercloud's code.
set -euo pipefail

: "${DATA:?a shared folder}" "${SERVER_ENV:?a virtual environment}" "${SGLANG_ENV:?another}"
: "${MODEL:?NAME=PATH of a Hugging Face folder}"
PORT=${PORT:-6379}
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-8}

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
ADDRESS=$(srun --nodes=1 --ntasks=1 -w "$HEAD" hostname --ip-address | awk '{print $1}')

# Whoever reaches Ray's ports and has no token is refused.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$DATA/ray_token
[[ -s $RAY_AUTH_TOKEN_PATH ]] || (umask 077; openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")
export RAY_USAGE_STATS_ENABLED=0 CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker0}

srun --nodes=1 --ntasks=1 -w "$HEAD" "$SERVER_ENV/bin/ray" start --head --block \
  --node-ip-address="$ADDRESS" --port="$PORT" --num-gpus="$GPUS_PER_NODE" --disable-usage-stats &
sleep 15
for node in "${NODES[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$node" "$SERVER_ENV/bin/ray" start --block \
    --address="$ADDRESS:$PORT" --num-gpus="$GPUS_PER_NODE" --disable-usage-stats &
done
sleep 15

srun --overlap --nodes=1 --ntasks=1 -w "$HEAD" "$SERVER_ENV/bin/tinkercloud" serve \
  --backend cluster --host 0.0.0.0 --data-dir "$DATA" --model "$MODEL" \
  --ray-address "$ADDRESS:$PORT" \
  --cluster-gpus "$((GPUS_PER_NODE * ${#NODES[@]}))" --cluster-gpus-per-node "$GPUS_PER_NODE" \
  --cluster-sglang-command "$SGLANG_ENV/bin/python -m tinkercloud.cluster.sglang.entry"
