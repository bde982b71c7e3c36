#!/usr/bin/env bash
# make_env.sh [DIRECTORY]: the environment in which the unmodified vllm-omni runs on a CPU (default .venv-vllm; 2.7 GB, about
# 100 s from a warm index). Kept while its requirements and this script are unchanged; our own packages are refreshed
# always.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
env=${1:-$root/.venv-vllm}
stamp=$(cat "$here/requirements.lock" "$root"/requirements/sdk*.txt "$here/make_env.sh" | sha256sum)

if [ "$(cat "$env/.made-from" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$env"
  "${PYTHON:-python3.11}" -m venv "$env"
  "$env/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.lock" -r "$root/requirements/sdk-nodeps.txt"
  # vllm-omni imports every SDK that it finds, and this one bears neither Mooncake's engine nor NIXL beside it in a process:
  # it is apart, on the path of the servers that use it.
  "$env/bin/python" -m pip install --quiet --no-deps --target "$env/apart" -r "$root/requirements/sdk.txt"
  # PyPI's torchaudio and torchvision are CUDA builds; vllm-omni needs them only to be importable.
  packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -f "$packages"/torchaudio/lib/*.so
  : > "$packages/torchvision/_meta_registrations.py"
  echo "$stamp" > "$env/.made-from"
fi

members=()
for member in "$root"/omni_connector_core "$root"/plugins/* "$root"/contract_tests "$root"/serve "$here"/rig; do
  [ -f "$member/pyproject.toml" ] && members+=(--editable "$member")
done
"$env/bin/python" -m pip install --quiet --no-deps --no-build-isolation "${members[@]}"
