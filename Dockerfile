# docker build -t maxds .                                  for TPU
# docker build -t maxds --build-arg EXTRA=cuda .           for GPU
# docker build --target check .                            checks the sources: format, lint, types, tests
# docker run maxds configs/quickstart.yaml steps=20
FROM python:3.12-slim AS check
WORKDIR /maxds
COPY . .
RUN scripts/check

FROM python:3.12-slim
ARG EXTRA=tpu
ENV PYTHONUNBUFFERED=1
WORKDIR /maxds
# What is installed changes rarely, and is a layer of its own: the package is found here, once its sources are.
COPY pyproject.toml LICENSE ./
COPY constraints constraints
COPY maxds/__init__.py maxds/
RUN touch README.md \
 && pip install --no-cache-dir -c constraints/py312.txt -e ".[$EXTRA,wandb]" \
 && useradd --create-home --uid 1000 maxds \
 && install --directory --owner=maxds runs
COPY configs configs
COPY maxds maxds
USER 1000
ENTRYPOINT ["python", "-m", "maxds.train"]
