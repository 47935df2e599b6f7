# An image of one party. From a checkout:
# docker build -t fedpact:0.1.0 --build-arg PIP_EXTRA_INDEX_URL=... .
# with the index of PyTorch's CPU wheels: of torch, deploy.lock lists that wheel alone.
FROM python:3.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY src/fedpact/deployment/deploy.lock ./deploy.lock
RUN python -m venv /opt/fedpact \
    && /opt/fedpact/bin/pip install --no-cache-dir --require-hashes -r deploy.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/fedpact/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/fedpact /opt/fedpact
RUN groupadd --gid 10001 fedpact \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin fedpact
# The root file system may be read only: what is written lies in /party and, for a while, in /tmp.
ENV PATH=/opt/fedpact/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /party
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["fedpact", "deploy", "health", "/party"]
ENTRYPOINT ["fedpact"]
