#!/usr/bin/env bash
# Builds the container image with whichever of docker, podman and buildah is here.
# Must not know: what is in the image (Dockerfile).
# Usage: scripts/build_image.sh TAG cpu|gpu BASE_IMAGE
set -euo pipefail
cd "$(dirname "$0")/.."

tag=${1:?usage: scripts/build_image.sh TAG cpu|gpu BASE_IMAGE}
arguments=(--build-arg "TORCH=${2:-cpu}" --build-arg "BASE=${3:-python:3.12-slim}" --tag "$tag")

# A docker client without a running engine is of no use, so it is asked.
if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    docker build --platform linux/amd64 "${arguments[@]}" .
elif command -v podman >/dev/null; then
    podman build --platform linux/amd64 "${arguments[@]}" .
elif command -v buildah >/dev/null; then
    buildah build --platform linux/amd64 "${arguments[@]}" .
else
    echo "image: no running Docker engine, podman or buildah was found; install one of them" >&2
    exit 1
fi
echo "image: built $tag" >&2
