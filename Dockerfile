# infer in a container. Its cache of models is the volume /cache; a model gets there with
#   docker build -t infer .
#   docker run --rm -v infer:/cache infer download openai/gpt-oss-20b
#   docker run --gpus all --stop-timeout 120 -v infer:/cache -p 127.0.0.1:8080:8080 -e INFER_API_KEY=... infer
# The driver must know this version: 13.0 needs 580 or later.
ARG CUDA=13.0.0

FROM nvidia/cuda:${CUDA}-devel-ubuntu22.04 AS build
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc g++ make pkg-config libcjson-dev libpcre2-dev libedit-dev libcurl4-openssl-dev libssl-dev libutf8proc-dev \
        libmicrohttpd-dev
WORKDIR /src
COPY Makefile page.html infer.1 *.c *.h *.cu *.cuh ./
COPY encodings encodings
COPY families families
COPY fast fast
# No GPU is here to ask: code for all that matter. One of them builds faster: --build-arg CUDA_ARCH=sm_90a
ARG CUDA_ARCH="sm_80 sm_86 sm_89 sm_90a compute_90"
RUN make -j"$(nproc)" install CUDA_ARCH="$CUDA_ARCH"

FROM nvidia/cuda:${CUDA}-runtime-ubuntu22.04
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates curl libcjson1 libpcre2-8-0 libedit2 libcurl4 libssl3 libutf8proc2 libmicrohttpd12 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home infer && install -d -o infer -g infer /cache
COPY --from=build /usr/local/bin/infer /usr/local/bin/
USER infer
WORKDIR /home/infer
ENV HF_HOME=/cache
VOLUME /cache
EXPOSE 8080
# While the model loads the answer is 503, which is no failure yet.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD curl -fsS -o /dev/null http://127.0.0.1:8080/health
ENTRYPOINT ["infer"]
CMD ["serve", "--host", "0.0.0.0"]
