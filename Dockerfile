# Two images. `docker build .`: the server with the embedded backend, on the CPU.
# `docker build --target cluster .`: CUDA, Ray, Megatron-core, Transformer Engine and SGLang, for the
# server and for every node of a cluster (docs/backends.md). Data (models, keys, results,
# checkpoints) lives in the volume /data. See docs/operations.md.

FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS cluster

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/server/bin:$PATH \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    TINKERCLOUD_BACKEND=cluster \
    TINKERCLOUD_HOST=0.0.0.0 \
    TINKERCLOUD_PORT=8700 \
    TINKERCLOUD_DATA_DIR=/data \
    TINKERCLOUD_CLUSTER_SGLANG_COMMAND="/opt/sglang/bin/python -m tinkercloud.cluster.sglang.entry"

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-venv git libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/server && python3 -m venv /opt/sglang \
 # Login shells, as KubeRay starts Ray with, set PATH anew.
 && echo 'export PATH=/opt/server/bin:$PATH' > /etc/profile.d/tinkercloud.sh

# Where pip finds CUDA builds of torch, if the default index has others.
ARG TORCH_INDEX_URL=""

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tinkercloud tinkercloud
COPY tinker_gmi tinker_gmi
# Transformer Engine compiles against the torch that is there. SGLang's pins rule its own environment;
# of tinkercloud it needs the code alone.
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} '.[cluster]' \
 && pip install --no-build-isolation -c constraints.txt '.[cuda]' \
 && /opt/sglang/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} 'sglang==0.5.23' \
 && /opt/sglang/bin/pip install --no-deps . \
 && useradd --system --create-home --uid 10001 tinkercloud \
 && mkdir /data && chown tinkercloud /data

USER tinkercloud
VOLUME /data
# The API; Ray's head, its client and its dashboard.
EXPOSE 8700 6379 10001 8265

# Ready: the engine answers, the volume takes writes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
  CMD ["python", "-c", "import http.client as h, os, sys; \
c = h.HTTPConnection('127.0.0.1', int(os.environ['TINKERCLOUD_PORT']), timeout=4); \
c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["tinkercloud"]
CMD ["serve"]


FROM python:3.11-slim AS embedded

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    TINKERCLOUD_HOST=0.0.0.0 \
    TINKERCLOUD_PORT=8700 \
    TINKERCLOUD_DATA_DIR=/data

# The forward pass of the sampler is compiled where it runs, for the processor that is there.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# Where pip finds a CPU build of torch, if the default index has only larger ones.
ARG TORCH_INDEX_URL=""

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tinkercloud tinkercloud
COPY tinker_gmi tinker_gmi
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} '.[embedded]' \
 && useradd --system --create-home --uid 10001 tinkercloud \
 && mkdir /data && chown tinkercloud /data

USER tinkercloud
VOLUME /data
EXPOSE 8700

# Ready: the engine answers, the volume takes writes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import http.client as h, os, sys; \
c = h.HTTPConnection('127.0.0.1', int(os.environ['TINKERCLOUD_PORT']), timeout=4); \
c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["tinkercloud"]
CMD ["serve"]
