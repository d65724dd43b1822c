# SPDX-License-Identifier: Apache-2.0
# Debian 13 with lamina built and tried. `make test-debian13` takes the same steps without a container engine; this file
# itself has not been run by one. STEPS are targets of the Makefile, TORCH_INDEX_URL is where pip takes torch from.
#     docker build --build-arg STEPS=demo .
FROM debian:trixie
ARG STEPS="demo test"
ARG TORCH_INDEX_URL=""
COPY . /lamina
RUN TORCH_INDEX_URL=$TORCH_INDEX_URL /lamina/scripts/bare_debian.sh $STEPS
ENV PATH=/lamina/.venv/bin:$PATH
