# The serving image, for Amazon SageMaker and Hugging Face Inference Endpoints.
#
#   docker build --build-arg TORCH=cpu -t invocant:cpu .
#   docker build --build-arg TORCH=gpu -t invocant:gpu .
#
# The GPU image needs no CUDA base: torch's wheels carry the libraries, the host mounts the driver.
ARG BASE=python:3.12-slim

FROM ${BASE} AS packages
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/venv
WORKDIR /build
COPY requirements/ requirements/
# As in scripts/setup.sh: the locked set is complete, so nothing is resolved and torch is the build asked for.
RUN /opt/venv/bin/pip install --no-deps --require-hashes -r requirements/runtime.txt
RUN case "$TORCH" in \
    cpu) /opt/venv/bin/pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
        -r requirements/torch-cpu.txt ;; \
    gpu) /opt/venv/bin/pip install -r requirements/torch-gpu.txt ;; \
    *) echo "TORCH is cpu or gpu, not '$TORCH'" >&2; exit 1 ;; \
    esac

FROM ${BASE}
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
LABEL org.opencontainers.image.title=invocant org.opencontainers.image.licenses=Apache-2.0
COPY --from=packages /opt/venv /opt/venv
COPY serve pyproject.toml LICENSE /opt/invocant/
COPY handler/ /opt/invocant/handler/
COPY container/ /opt/invocant/container/
RUN python3 -m compileall -q /opt/invocant && ln -s /opt/invocant/serve /usr/local/bin/serve
# /opt/ml/model and /repository are read-only, and only /tmp is sure to be writable.
ENV PATH=/opt/venv/bin:$PATH \
    PORT=8080 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/tmp/cache \
    HF_HOME=/tmp/huggingface \
    TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
WORKDIR /tmp
EXPOSE 8080
# SageMaker starts the image as `docker run IMAGE serve`: `serve serve` is the same as `serve`.
ENTRYPOINT ["serve"]
