# The server with the embedded backend, on the CPU. Data (models, keys, results, checkpoints) lives
# in the volume /data. See docs/operations.md.
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    TINKERCLOUD_HOST=0.0.0.0 \
    TINKERCLOUD_PORT=8700 \
    TINKERCLOUD_DATA_DIR=/data

# Where pip finds a CPU build of torch, if the default index has only larger ones.
ARG TORCH_INDEX_URL=""

WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./
COPY tinkercloud tinkercloud
COPY tinker_gmi tinker_gmi
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} '.[embedded]' \
 && useradd --system --create-home --uid 10001 tinkercloud \
 && mkdir /data && chown tinkercloud /data

USER tinkercloud
VOLUME /data
EXPOSE 8700

# 401 is an answer: the server lives, and asks for a key.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import http.client as h, os, sys; \
c = h.HTTPConnection('127.0.0.1', int(os.environ['TINKERCLOUD_PORT']), timeout=4); \
c.request('GET', '/api/v1/healthz'); sys.exit(c.getresponse().status not in (200, 401))"]

ENTRYPOINT ["tinkercloud"]
CMD ["serve"]
