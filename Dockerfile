# docker build -t maxds .                                  for TPU; checks the sources on the way
# docker build -t maxds --build-arg EXTRA=cuda .           for GPU
# docker run maxds configs/quickstart.yaml steps=20
FROM python:3.12-slim AS check
WORKDIR /maxds
COPY . .
RUN scripts/check && rm -rf .venv-*

FROM python:3.12-slim
ARG EXTRA=tpu
WORKDIR /maxds
COPY --from=check /maxds .
RUN pip install --no-cache-dir -c constraints/py312.txt -e ".[$EXTRA]"
ENTRYPOINT ["python", "-m", "maxds.train"]
