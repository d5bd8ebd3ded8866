# megapar on NVIDIA GPUs. From the root of the repository:
#   docker build --file docker/cuda.Dockerfile --tag megapar:cuda .
# torch's wheels bring CUDA, cuDNN and NCCL. The host needs the driver and NVIDIA's container toolkit.
FROM debian:bookworm-slim

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Triton compiles its launchers with the compiler and Python's headers. NCCL opens libibverbs for InfiniBand and RoCE.
# Debian serves one version of a package, so a pin would only break later builds.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ ibverbs-providers libibverbs1 librdmacm1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 megapar \
    && python3 -m venv /opt/venv \
    && install --directory --owner megapar --group megapar /runs

# The packages have their own layer, which a change of megapar does not rebuild.
COPY docker/requirements/cuda.txt /tmp/requirements.txt
RUN pip install --requirement /tmp/requirements.txt

COPY . /megapar
WORKDIR /megapar
RUN pip install --no-deps --no-build-isolation --editable .

USER 1000
RUN megapar plan --config configs/tiny.yaml --world-size 1
CMD ["megapar", "--help"]
