# Shared by the scripts of this folder; sourced, never run. Sets ROOT (the repository), VENV and the
# build environment, and changes into ROOT.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$ROOT"

PYTHON_VERSION=3.11 # the one that the pinned packages are for

is_right_python() { "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$PYTHON_VERSION')" 2>/dev/null; }

# Unless one is named: the right one, by whatever name it is there.
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    ! is_right_python "python$PYTHON_VERSION" || PYTHON=python$PYTHON_VERSION
fi
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
CACHE=$ROOT/.cache
VLLM_NEXT=0.33.0 # its Python sources are laid over the installed vLLM for unit tests
VLLM_NEXT_DIR=$CACHE/vllm-$VLLM_NEXT
VLLM_CASES_DIR=$CACHE/vllm-tests # vLLM's own tests, by version
WHEEL_DIR=$ROOT/target/wheels
SERVERS_DIR=$CACHE/servers

# The extension module is never linked against libpython: the same setting for every cargo command,
# so that clippy, tests and the wheel share what they have built.
export PYO3_BUILD_EXTENSION_MODULE=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# A user's own Python set-up must not leak into the virtual environment.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
# Packages are installed without byte code, so the first import of each module must keep it: an
# engine start that compiles all of torch and vLLM anew takes twice as long.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# digest [FILE|DIRECTORY|=TEXT]...: one hash over contents, names and texts, the same in every checkout.
digest() {
    local item
    for item in "$@"; do
        if [[ $item == =* ]]; then
            printf '%s\n' "$item"
        else
            find "$item" -type f ! -name '*.pyc' ! -name '*.so' ! -path '*/target/*' -print0 |
                LC_ALL=C sort -z | xargs -0 -r sha256sum
        fi
    done | sha256sum | cut -d' ' -f1
}

# fresh STAMP DIGEST: true when what the stamp stands for was made from these very inputs.
fresh() { [[ -f $1 && $(<"$1") == "$2" ]]; }
