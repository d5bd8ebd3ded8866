# megapar on Ascend NPUs (Atlas A2: 910B). From the root of the repository:
#   docker build --file docker/ascend.Dockerfile --tag megapar:ascend .
# The base is the vendor's image of its toolkit, CANN, with Python. The host needs the driver and the firmware. For an A3
# (910C), pass --build-arg CANN=9.1.0-a3-ubuntu22.04-py3.12.
ARG CANN=9.1.0-910b-ubuntu22.04-py3.12
FROM quay.io/ascend/cann:${CANN}

# scripts/ascend_env.sh reads ASCEND_TOOLKIT.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
ENV ASCEND_TOOLKIT=/usr/local/Ascend/ascend-toolkit

# The user of the vendor's driver has the number 1000 (HwHiAiUser); another number cannot open the devices.
RUN (getent passwd 1000 || useradd --create-home --uid 1000 megapar) \
    && install --directory --owner 1000 --group 1000 /runs

# The packages have their own layer, which a change of megapar does not rebuild. They go into the image's Python, which has
# what the vendor's operator compiler imports.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY docker/requirements/ascend.txt /tmp/requirements.txt
RUN python3 -m pip install --extra-index-url "$TORCH_INDEX" --requirement /tmp/requirements.txt

COPY . /megapar
WORKDIR /megapar
RUN python3 -m pip install --no-deps --no-build-isolation --editable .

USER 1000
RUN megapar plan --config configs/tiny.yaml --world-size 1
CMD ["megapar", "--help"]
