# syntax=docker/dockerfile:1
# Made by scripts/make_dockerfiles.py from docker/template.Dockerfile; change those.
#
#   make dist
#   docker build -f docker/cuda12.8.Dockerfile -t surogate:cuda12.8 .
#   docker run --rm --gpus all -v "$PWD:/work" surogate:cuda12.8 demo
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The compilers of torch and Triton call g++ and read Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/surogate

ENV PATH=/opt/surogate/bin:$PATH \
    PYTHONUNBUFFERED=1

RUN pip install --no-cache-dir torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128

RUN --mount=type=bind,source=dist,target=/wheels \
    pip install --no-cache-dir --find-links /wheels "surogate[cuda12]==0.1.0"

# The user that Ubuntu's images have.
RUN install --directory --owner 1000 --group 1000 /work
USER 1000
WORKDIR /work

ENTRYPOINT ["surogate"]
CMD ["--help"]
