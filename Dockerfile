# The kvdock server: no torch, no GPU, no compiler, no pip and no curl in the image that runs.
#
#     docker build -t kvdock .
#     docker run --rm --name kvdock --ipc shareable --shm-size 9g --read-only --cap-drop ALL \
#         --security-opt no-new-privileges -v kvdock-run:/run/kvdock \
#         kvdock --pool-bytes 8GiB
#
# Engines map the pool themselves, so they need the server's /dev/shm, its socket, and to be its user, or root:
#
#     docker run --ipc container:kvdock -e KVDOCK_TRUSTED_UID=7410 -v kvdock-run:/run/kvdock … engine of root at \
#         unix:/run/kvdock/kvdock.sock, or --user 7410 in place of the variable
#
# examples/compose.yaml runs both.
#
# The shared /dev/shm has the server's --shm-size: the pool and its table (63 MiB) must fit. For engines
# on the host itself give the server `--ipc host`, the `--user` of the engines and a bind mount that they can
# reach. The TCP port listens inside the container alone; docs/operate/docker.md says how to open it, with an access
# file.
# SIGTERM drains for up to 5 s, so the 10 s of `docker stop` are long enough.

# What runs and what builds it, by digest: the same bytes whenever it is built. For a newer one:
#
#     docker buildx imagetools inspect python:3.11-slim --format '{{.Manifest.Digest}}'
ARG PYTHON=python:3.11.16-slim@sha256:8203f8b7cc03e7a0b2da2a7bfebdb7e39d985983791e2aba5b01cc535bf36f53

FROM ${PYTHON} AS build
# Debian's newest; the bill of materials names the versions.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pins pins
# What runs, what builds it, and what lists it have an environment each; pip checks the hashes of all three.
RUN python -m venv /opt/kvdock && python -m venv /build && python -m venv /tools \
    && /opt/kvdock/bin/pip install --require-hashes -r pins/server.txt \
    && /build/bin/pip install --require-hashes -r pins/build.txt \
    && /tools/bin/pip install --require-hashes -r pins/tools.txt
COPY . .
RUN /build/bin/pip wheel --no-build-isolation --no-deps -w dist . ./packages/server \
    && /opt/kvdock/bin/pip install --no-index --no-deps dist/*.whl \
    && /opt/kvdock/bin/pip check \
    && /opt/kvdock/bin/pip uninstall -y pip setuptools \
    && /tools/bin/python pins/bill.py /opt/kvdock/bin/python \
        /opt/kvdock/lib/python3.11/site-packages/kvdock/_core.*.so /opt/kvdock/sbom.cdx.json

FROM ${PYTHON}
LABEL org.opencontainers.image.title="kvdock" \
    org.opencontainers.image.description="The KV-cache server that every LLM inference engine on a machine shares" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 7410 --no-create-home --shell /usr/sbin/nologin kvdock \
    && install -d -o kvdock -m 0700 /run/kvdock \
    && pip uninstall -y --root-user-action ignore wheel setuptools pip
COPY --from=build /opt/kvdock /opt/kvdock
ENV PATH=/opt/kvdock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 KVDOCK_SOCKET_PATH=/run/kvdock/kvdock.sock
# Where /dev/shm outlives the container (--ipc host), so does the pool.
ENV KVDOCK_ON_EXIT=keep
# By number, so that Kubernetes can see that it is not root.
USER 7410
EXPOSE 7410
VOLUME /run/kvdock
# Over the Unix socket, which needs neither access token nor host name.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-I", "-S", "-c", "import os, socket; s = socket.socket(socket.AF_UNIX); \
s.connect(os.environ['KVDOCK_SOCKET_PATH']); s.sendall(b'GET /livez HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n'); \
raise SystemExit(b' 200 ' not in s.recv(64))"]
ENTRYPOINT ["kvdock", "serve"]
