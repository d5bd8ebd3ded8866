# megapar on CPUs: to try it, to prepare data, to plan. From the root of the repository:
#   docker build --file docker/cpu.Dockerfile --tag megapar:cpu .
FROM debian:bookworm-slim

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# torch.compile needs the compiler. Debian serves one version of a package, so a pin would only break later builds.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 megapar \
    && python3 -m venv /opt/venv \
    && install --directory --owner megapar --group megapar /runs

# The packages have their own layer, which a change of megapar does not rebuild. For another index of PyTorch's CPU builds,
# pass --build-arg TORCH_INDEX=URL.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY docker/requirements/cpu.txt /tmp/requirements.txt
RUN pip install --extra-index-url "$TORCH_INDEX" --requirement /tmp/requirements.txt

COPY . /megapar
WORKDIR /megapar
RUN pip install --no-deps --no-build-isolation --editable .

USER 1000
RUN megapar plan --config configs/tiny.yaml --world-size 1
CMD ["megapar", "--help"]
