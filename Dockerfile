# The kvdock server: no torch, no GPU, no compiler in the image that runs.
#
#     docker build -t kvdock .
#     docker run --rm --name kvdock --shm-size 9g -p 127.0.0.1:7410:7410 -v kvdock-run:/run/kvdock kvdock --pool-bytes 8GiB
#
# Engines reach the memory itself, so they must see the same /dev/shm and the same socket:
#
#     docker run --ipc container:kvdock -v kvdock-run:/run/kvdock --user 7410 … your engine …
#
# with KVDOCK's address unix:/run/kvdock/kvdock.sock. `--ipc container:` shares /dev/shm, and its size is the
# server's --shm-size: the pool and about 64 MiB for its table must fit. An engine on the host itself wants
# `--ipc host` on the server instead, and --shm-size is then the host's. Segments and socket are readable by
# their owner only, hence the same user in both.

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
# Everything the server needs, at the pinned versions; building needs three things more.
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
    KVDOCK_HOST=0.0.0.0 KVDOCK_SOCKET_PATH=/run/kvdock/kvdock.sock
USER kvdock
EXPOSE 7410
VOLUME /run/kvdock
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["curl", "--fail", "--silent", "--output", "/dev/null", "--unix-socket", "/run/kvdock/kvdock.sock", "http://kvdock/livez"]
ENTRYPOINT ["kvdock", "serve"]
