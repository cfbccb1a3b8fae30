# vLLM's own image with kvdock's connector in it. Build it in a checkout:
#
#     docker build -f examples/vllm.Dockerfile --build-arg DIGEST=sha256:… -t vllm-kvdock .
#
# DIGEST is that of vLLM's image; it has no default, and nothing is built without it:
#
#     docker buildx imagetools inspect vllm/vllm-openai:v0.33.0 --format '{{.Manifest.Digest}}'
#
# `--build-arg VLLM=v0.32.0`, with its digest, builds with another version of vLLM. The command and the user, root, are those of vLLM's image;
# so it trusts the server of another user: that of kvdock's image. docs/operate/docker.md has the `docker run` lines, and examples/compose.yaml runs both.

ARG VLLM=v0.33.0
ARG DIGEST

# The extension is built in the image in which it runs: for vLLM's Python, with the nvcc that vLLM's image has.
FROM vllm/vllm-openai:${VLLM}@${DIGEST} AS build
# The compiler is in no image that runs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pins pins
RUN python3 -m venv /build \
    && /build/bin/pip install --require-hashes -r pins/build.txt \
    && /build/bin/pip download --require-hashes --no-deps -d dist -r pins/server.txt
COPY . .
RUN /build/bin/pip wheel --no-build-isolation --no-deps --config-settings=cmake.define.KVDOCK_CUDA=require -w dist .

FROM vllm/vllm-openai:${VLLM}@${DIGEST}
# vLLM's packages are not changed: the connector needs msgspec, and uses vLLM's if that is there. /dist has one version of each.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/src/dist,target=/dist \
    python3 -m pip install --no-cache-dir --no-index --find-links /dist --no-deps kvdock-engine msgspec \
    && python3 -c "from kvdock import _core; raise SystemExit(not _core.cuda_kernels() \
and 'kvdock was built without its GPU kernels, for want of nvcc')"
ENV HF_HOME=/models KVDOCK_ADDRESS=unix:/run/kvdock/kvdock.sock KVDOCK_TRUSTED_UID=7410
