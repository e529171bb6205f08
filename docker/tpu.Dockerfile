# An image for hosts of a TPU slice. From the root of a checkout:
#   docker build --file=docker/tpu.Dockerfile --tag=IMAGE .
# The wheel is built in an image that has git, so that it knows its commit.
FROM python:3.12-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .

FROM python:3.12-slim-bookworm
ARG EXTRAS=tpu,gcs,data,parquet,tensorboard
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/rmt_tpu-*.whl)[${EXTRAS}]"
# A log shows each line at once.
ENV PYTHONUNBUFFERED=1
WORKDIR /rmt
CMD ["rmt-train", "--help"]
