# The kvdock server: no torch, no GPU, no compiler in the image that runs.
#
#     docker build -t kvdock .
#     docker run --rm --name kvdock --ipc shareable --shm-size 9g -v kvdock-run:/run/kvdock \
#         -p 127.0.0.1:7410:7410 kvdock --pool-bytes 8GiB
#
# Engines map the pool themselves, so they need the server's /dev/shm, its socket and its user:
#
#     docker run --ipc container:kvdock --user 7410 -v kvdock-run:/run/kvdock … engine at unix:/run/kvdock/kvdock.sock
#
# The shared /dev/shm has the server's --shm-size: the pool and its table (63 MiB) must fit. For engines
# on the host itself give the server `--ipc host`, the `--user` of the engines and a bind mount that they can
# reach. Do not publish port 7410 beyond loopback: it has no authentication. SIGTERM drains for up to
# 5 s, so the 10 s of `docker stop` are long enough. See docs/deploy.md.

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
# The build tools, at the pinned versions, in an environment of their own.
RUN python -m venv /opt/kvdock && python -m venv /build \
    && grep -E '^(scikit_build_core|pybind11|cmake|ninja|packaging|pathspec)==' constraints.txt > build.txt \
    && /build/bin/pip install --no-cache-dir -r build.txt
COPY . .
RUN /build/bin/pip wheel --no-build-isolation --no-deps -w dist . \
    && /opt/kvdock/bin/pip install --no-cache-dir -c constraints.txt dist/*.whl \
    && /opt/kvdock/bin/pip uninstall -y pip

FROM python:3.11-slim
RUN apt-get update && apt-get install --no-install-recommends -y curl && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 7410 --no-create-home --shell /usr/sbin/nologin kvdock \
    && install -d -o kvdock -m 0700 /run/kvdock
COPY --from=build /opt/kvdock /opt/kvdock
ENV PATH=/opt/kvdock/bin:$PATH PYTHONUNBUFFERED=1 \
    KVDOCK_HOST=0.0.0.0 KVDOCK_ALLOWED_HOSTS=localhost,127.0.0.1 KVDOCK_SOCKET_PATH=/run/kvdock/kvdock.sock
USER kvdock
EXPOSE 7410
VOLUME /run/kvdock
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD curl --fail --silent --output /dev/null --unix-socket "$KVDOCK_SOCKET_PATH" http://localhost/livez
ENTRYPOINT ["kvdock", "serve"]
