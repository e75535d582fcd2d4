# A router: `python -m router`. No model, no torch, no Ray. Context: the root of the repository.
#   docker build -f deploy/images/router.Dockerfile -t kvasir-router .
# BASE is any image with Python 3.11 to 3.13 as python3, with venv and pip.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS packages
ENV PYTHONDONTWRITEBYTECODE=1
COPY requirements/build.txt requirements/router.txt /tmp/requirements/
RUN python3 -m venv /tmp/tools \
    && /tmp/tools/bin/python -m pip install --no-cache-dir --require-hashes \
        --requirement /tmp/requirements/build.txt
RUN python3 -m venv --without-pip /opt/kvasir \
    && /tmp/tools/bin/uv pip install --no-cache --no-deps --require-hashes --python /opt/kvasir/bin/python \
        --requirement /tmp/requirements/router.txt
COPY replicas/__init__.py /app/replicas/
COPY replicas/process /app/replicas/process
COPY replicas/protocol /app/replicas/protocol
COPY router /app/router
COPY deploy/images/make_sbom.py /tmp/
RUN /opt/kvasir/bin/python /tmp/make_sbom.py kvasir-router >/app/sbom.json \
    && /opt/kvasir/bin/python -m compileall -q /app /opt/kvasir/lib

FROM ${BASE}
LABEL org.opencontainers.image.title="Kvasir router" \
      org.opencontainers.image.description="OpenAI's API; every prompt goes to the replica that holds its KV cache"
COPY --from=packages /opt/kvasir /opt/kvasir
COPY --from=packages /app /app
WORKDIR /app
ENV PATH=/opt/kvasir/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    KVASIR_ROUTER_HOST=0.0.0.0 KVASIR_ROUTER_PORT=8000 KVASIR_ROUTER_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen(f\"http://127.0.0.1:{os.environ['KVASIR_ROUTER_PORT']}/health\", timeout=2)"]
ENTRYPOINT ["python", "-m", "router"]
