# syntax=docker/dockerfile:1
# @MADE@
#
#   make dist
#   docker build -f docker/@NAME@.Dockerfile -t surogate:@NAME@ .
#   docker run --rm @RUN@-v "$PWD:/work" surogate:@NAME@ demo
FROM @BASE@

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

RUN pip install --no-cache-dir torch==@TORCH@ --index-url @INDEX@

RUN --mount=type=bind,source=dist,target=/wheels \
    pip install --no-cache-dir --find-links /wheels "surogate@EXTRA@==@VERSION@"

# The user that Ubuntu's images have.
RUN install --directory --owner 1000 --group 1000 /work
USER 1000
WORKDIR /work

ENTRYPOINT ["surogate"]
CMD ["--help"]
