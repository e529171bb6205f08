# An image for nodes with NVIDIA GPUs. From the root of a checkout:
#   docker build --file=docker/gpu.Dockerfile --tag=IMAGE .
# The wheel is built in an image that has git, so that it knows its commit.
FROM python:3.12-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .

# CUDA's libraries come with jax[cuda13]; the node has the driver and the NVIDIA Container Toolkit.
FROM python:3.12-slim-bookworm
ARG EXTRAS=cuda,gcs,data,parquet,tensorboard
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/rmt_tpu-*.whl)[${EXTRAS}]"
# The toolkit reads the first two. A log shows each line at once.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
WORKDIR /rmt
CMD ["rmt-train", "--help"]
