#!/usr/bin/env bash
# The first command: installs what is missing, builds, plays.
#   ./run.sh                 plays models/tiny; in a script asks one question
#   ./run.sh play [...]      asks which model, or arguments of `infer play`
#   ./run.sh download [...]  fetches openai/gpt-oss-20b, or another ORG/NAME
#   ./run.sh bench [...]     measures speed, arguments of `infer bench`
#   ./run.sh test [...]      runs the tests, or those named; --fetch gets files
set -euo pipefail
cd "$(dirname "$0")"

read -ra packages <<<"gcc make pkg-config $(sed -n 's/^PACKAGES *= //p' Makefile)"

install_missing() {
    local missing=() package
    if ! command -v dpkg-query >/dev/null; then
        echo "run.sh: this is no Debian or Ubuntu; install the equivalents of: ${packages[*]}" >&2
        return
    fi
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    echo "Installing ${missing[*]}"
    local root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    "${root[@]}" apt-get update -q
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}"
}

if [ $# -eq 0 ]; then
    set -- play models/tiny
    if [ ! -t 0 ] || [ ! -t 1 ]; then
        set -- "$@" "What is 58213 + 947?" --temperature 0
        exec </dev/null
    fi
fi
command=$1
shift
case $command in
    play | download | bench | test) ;;
    *)
        sed -n '3,7s/^# *//p' "$0" >&2
        exit 2
        ;;
esac
[ "$command" != test ] || packages+=(python3 openssl)
[[ "$command $*" != test*--fetch* ]] || packages+=(python3-venv)
install_missing >&2
[ "$command" != test ] || exec make --no-print-directory test TESTS="$*"
gpu=yes nvcc=yes target=infer program=./infer
nvidia-smi -L >/dev/null 2>&1 || gpu=no
command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || nvcc=no
[ $gpu$nvcc = yesyes ] || target=reference program=./infer-reference
if [ "$command" = download ]; then # it needs no GPU
    [ $# -gt 0 ] || set -- openai/gpt-oss-20b
elif [ $gpu = no ]; then
    echo "infer needs an NVIDIA GPU; here is infer-reference, its plain C twin on the CPU" >&2
elif [ $nvcc = no ]; then
    echo "run.sh: no nvcc: install the CUDA toolkit (developer.nvidia.com/cuda-downloads) or set CUDA_HOME" >&2
    exit 1
fi
make -q "$target" 2>/dev/null || make --no-print-directory -j"$(nproc)" "$target" >&2
exec "$program" "$command" "$@"
