# A replica on NVIDIA GPUs: vLLM inside `python -m replicas`, and Ray for a fleet. Context: the root of the repository.
#   docker build -f deploy/images/replica-cuda.Dockerfile -t kvasir-replica-cuda .
# CUDA's libraries come with torch; the driver comes from the machine, through NVIDIA's container toolkit.
# BASE is any Debian or Ubuntu with Python 3.11 as python3, with its headers, venv and pip.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS packages
ENV PYTHONDONTWRITEBYTECODE=1
COPY requirements/build.txt requirements/lock.txt requirements/torch.txt requirements/vllm-cuda.txt /tmp/requirements/
RUN python3 -m venv /tmp/tools \
    && /tmp/tools/bin/python -m pip install --no-cache-dir --require-hashes \
        --requirement /tmp/requirements/build.txt
RUN python3 -m venv --without-pip /opt/kvasir \
    && /tmp/tools/bin/uv pip install --no-cache --no-deps --require-hashes --python /opt/kvasir/bin/python \
        --requirement /tmp/requirements/lock.txt --requirement /tmp/requirements/torch.txt \
        --requirement /tmp/requirements/vllm-cuda.txt
COPY pyproject.toml README.md /app/
COPY cluster /app/cluster
COPY loadtests /app/loadtests
COPY replicas /app/replicas
COPY router /app/router
COPY deploy/images/make_sbom.py /tmp/
RUN /tmp/tools/bin/uv pip install --no-cache --no-deps --python /opt/kvasir/bin/python \
        --build-constraints /tmp/requirements/build.txt --editable /app \
    && /opt/kvasir/bin/python /tmp/make_sbom.py kvasir-replica-cuda >/app/sbom.json \
    && /opt/kvasir/bin/python -m compileall -q /app

FROM ${BASE}
LABEL org.opencontainers.image.title="Kvasir replica (CUDA)" \
      org.opencontainers.image.description="A model server with a prefix-cached KV cache: vLLM on NVIDIA GPUs"
# Triton compiles its launchers with a C compiler when it first runs a kernel; KubeRay's probes ask with wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 kvasir \
    && useradd --uid 10001 --gid 10001 --create-home kvasir
COPY --from=packages /opt/kvasir /opt/kvasir
COPY --from=packages /app /app
COPY deploy/images/check_replica.py /app/deploy/
WORKDIR /app
ENV PATH=/opt/kvasir/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KVASIR_REPLICA_ENGINE=vllm KVASIR_REPLICA_PORT=50051 KVASIR_REPLICA_METRICS_PORT=9100 \
    KVASIR_REPLICA_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50051 9100
# Loading a large model takes minutes; until the start period is over a failing check means nothing.
HEALTHCHECK --interval=5s --timeout=5s --start-period=900s --retries=3 \
    CMD ["python", "/app/deploy/check_replica.py"]
ENTRYPOINT ["python", "-m", "replicas"]
