# A replica on CPUs: `python -m replicas`, and Ray for a fleet. Context: the root of the repository.
#   docker build -f deploy/images/replica-cpu.Dockerfile -t kvasir-replica-cpu .
# BASE is any Debian or Ubuntu with Python 3.11 to 3.13 as python3, with venv and pip.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS packages
# Which build of torch is installed (cpu, cu130, …); empty takes what the package index or UV_FIND_LINKS has.
ARG TORCH_BACKEND=cpu
# Folders of wheels that are mounted during the build, if the package index is not all there is.
ARG UV_FIND_LINKS
ENV PYTHONDONTWRITEBYTECODE=1
COPY requirements/build.txt requirements/lock.txt requirements/torch.txt /tmp/requirements/
RUN python3 -m venv /tmp/tools \
    && /tmp/tools/bin/python -m pip install --no-cache-dir --require-hashes \
        --requirement /tmp/requirements/build.txt
# torch by its version alone: other indexes than PyPI have other files.
RUN python3 -m venv --without-pip /opt/kvasir \
    && /tmp/tools/bin/uv pip install --no-cache --no-deps --require-hashes --python /opt/kvasir/bin/python \
        --requirement /tmp/requirements/lock.txt \
    && /tmp/tools/bin/uv pip install --no-cache --python /opt/kvasir/bin/python \
        ${TORCH_BACKEND:+"--torch-backend=${TORCH_BACKEND}"} "$(grep -o '^torch==[^ ]*' /tmp/requirements/torch.txt)"
COPY pyproject.toml README.md /app/
COPY cluster /app/cluster
COPY loadtests /app/loadtests
COPY replicas /app/replicas
COPY router /app/router
COPY deploy/images/make_sbom.py /tmp/
RUN /tmp/tools/bin/uv pip install --no-cache --no-deps --python /opt/kvasir/bin/python \
        --build-constraints /tmp/requirements/build.txt --editable /app \
    && /opt/kvasir/bin/python /tmp/make_sbom.py kvasir-replica-cpu >/app/sbom.json \
    && /opt/kvasir/bin/python -m compileall -q /app

FROM ${BASE}
LABEL org.opencontainers.image.title="Kvasir replica (CPU)" \
      org.opencontainers.image.description="A model server with a prefix-cached KV cache, on CPUs"
# KubeRay's probes of Ray's nodes ask with wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 kvasir \
    && useradd --uid 10001 --gid 10001 --create-home kvasir
COPY --from=packages /opt/kvasir /opt/kvasir
COPY --from=packages /app /app
COPY deploy/images/check_replica.py /app/deploy/
WORKDIR /app
ENV PATH=/opt/kvasir/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    KVASIR_REPLICA_PORT=50051 KVASIR_REPLICA_METRICS_PORT=9100 KVASIR_REPLICA_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50051 9100
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "/app/deploy/check_replica.py"]
ENTRYPOINT ["python", "-m", "replicas"]
